"""Peak memory of a rank of each pipeline stage, in bytes."""

from dataclasses import dataclass
from math import ceil

from megatron.config import RunConfig
from megatron.partition import Stage, plan
from megatron.planner.activations import Activations, activations
from megatron.planner.formulas import micro_batches_in_flight
from megatron.planner.parameters import numel, stage_weights
from megatron.planner.states import States, states


@dataclass(frozen=True)
class Working:
    """What a micro-batch takes at the worst moment of its way."""

    activations: int
    logits: int
    buffers: int
    """What the pipeline engine keeps of tensors that come and go."""
    in_flight: int
    """Micro-batches whose activations are kept at a time."""


@dataclass(frozen=True)
class Memory:
    """Where the memory of a rank goes at the moment when it is most."""

    parameters: int
    """Elements that the rank computes with, wherever they lie."""
    states: States
    working: Working

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for. What the optimizer's step takes beyond the backward pass counts as buffers."""
        backward = self.working.activations + self.working.logits + self.working.buffers
        return {
            "weights": self.states.weights,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "activations": self.working.activations,
            "logits": self.working.logits,
            "buffers": self.states.buffers + self.working.buffers + max(self.states.step - backward, 0),
        }

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts().values())


def stage_memory(run: RunConfig, owner: int | None = None) -> list[Memory]:
    """What a rank of each pipeline stage takes at its peak; ``owner`` as in ``states``.

    ``run`` has its batch and vocabulary settled.
    """
    found, kept = [], activations(run)
    for number, stage in enumerate(plan(run)):
        weights = stage_weights(run, stage)
        found.append(Memory(numel(weights), states(run, weights, owner), working(run, stage, number, kept)))
    return found


def working(run: RunConfig, stage: Stage, number: int, micro_batch: Activations) -> Working:
    """The working memory of a rank of ``stage``, which is the one of that number."""
    layers, (has_front, has_back) = layers_of(run, stage), ends_of(run, stage)
    in_flight, together = _in_flight(run, number), run.activation.layers_together
    kept = ceil(layers / together) * micro_batch.kept_input if together else layers * micro_batch.layer
    each = kept + (micro_batch.front if has_front else 0)
    back = micro_batch.back if has_back else 0
    logits = micro_batch.logits if has_back else 0
    again = min(together, layers) * micro_batch.layer  # what a layer did not keep is there again when it goes backward
    if run.model.recomputes_attention:
        again = micro_batch.scores
    inside = again + micro_batch.passing
    at_the_loss = logits + back > inside
    return Working(
        activations=in_flight * each + (back if at_the_loss else inside),
        logits=logits if at_the_loss else 0,
        buffers=_pipeline_buffers(run, number, has_back, micro_batch),
        in_flight=in_flight,
    )


def layers_of(run: RunConfig, stage: Stage) -> int:
    """Transformer layers of a stage."""
    return sum(map(len, stage.pieces)) - sum(ends_of(run, stage))


def ends_of(run: RunConfig, stage: Stage) -> tuple[bool, bool]:
    """Whether a stage has the embeddings, and whether it has the head."""
    return stage.pieces[0].start == 0, stage.pieces[-1].stop > run.model.num_layers + 1


def _in_flight(run: RunConfig, number: int) -> int:
    parallel, accumulated = run.parallel, run.train.gradient_accumulation_steps
    if not parallel.uses_pipeline:
        return 1
    if parallel.folds_pipeline:  # twice the stages of passes are under way, each through half of the stage's layers
        return min(accumulated, parallel.pipe_stages + 1)
    return micro_batches_in_flight(number, parallel.pipe_stages, accumulated)


def _pipeline_buffers(run: RunConfig, number: int, has_back: bool, micro_batch: Activations) -> int:
    """Tensors between stages: what has come in, what goes out, their gradients, and logits until they are replaced.

    DeepSpeed keeps a place for each of at least two micro-batches.
    """
    if not run.parallel.uses_pipeline:
        return 0
    in_flight = _in_flight(run, number)
    places, received = max(2, in_flight), 0 if number == 0 else 3
    if has_back:
        between = 0 if run.parallel.pipe_stages == 1 else (places + received) * micro_batch.hidden
        return places * micro_batch.stored_logits + between
    return (received + 1 + in_flight) * micro_batch.hidden
