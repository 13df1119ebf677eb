"""Peak memory of a rank of each pipeline stage, in bytes."""

from dataclasses import dataclass
from math import ceil

from megatron.config import RunConfig
from megatron.partition import Stage, plan
from megatron.planner import activations
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
        """Bytes by what they are for."""
        return {
            "weights": self.states.weights,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "activations": self.working.activations,
            "logits": self.working.logits,
            "buffers": self.states.buffers + self.working.buffers,
        }

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts().values())


def stage_memory(run: RunConfig, owner: int | None = None) -> list[Memory]:
    """What a rank of each pipeline stage takes at its peak; ``owner`` as in ``states``.

    ``run`` has its batch and vocabulary settled.
    """
    found = []
    for number, stage in enumerate(plan(run)):
        weights = stage_weights(run, stage)
        found.append(Memory(numel(weights), states(run, weights, owner), working(run, stage, number)))
    return found


def working(run: RunConfig, stage: Stage, number: int) -> Working:
    """The working memory of a rank of ``stage``, which is the one of that number."""
    layers, last = layers_of(run, stage), run.model.num_layers + 1
    has_front, has_back = (any(unit in piece for piece in stage.pieces) for unit in (0, last))
    in_flight, together = _in_flight(run, number), run.activation.layers_together
    per_layer = activations.layer_bytes(run)
    kept = ceil(layers / together) * activations.kept_input_bytes(run) if together else layers * per_layer
    each = kept + (activations.front_bytes(run) if has_front else 0)
    back = activations.back_bytes(run) if has_back else 0
    logits = activations.logits_bytes(run) if has_back else 0
    again = min(together, layers) * per_layer  # what a layer did not keep is there again when it goes backward
    if run.model.recomputes_attention:
        again = activations.score_bytes(run)
    inside = again + activations.passing_bytes(run)
    at_the_loss = logits + back > inside
    return Working(
        activations=in_flight * each + (back if at_the_loss else inside),
        logits=logits if at_the_loss else 0,
        buffers=_pipeline_buffers(run, number, has_back),
        in_flight=in_flight,
    )


def layers_of(run: RunConfig, stage: Stage) -> int:
    """Transformer layers of a stage."""
    return sum(1 <= unit <= run.model.num_layers for piece in stage.pieces for unit in piece)


def _in_flight(run: RunConfig, number: int) -> int:
    parallel, accumulated = run.parallel, run.train.gradient_accumulation_steps
    if not parallel.uses_pipeline:
        return 1
    if parallel.folds_pipeline:  # twice the stages of passes are under way, each through half of the stage's layers
        return min(accumulated, parallel.pipe_stages + 1)
    return micro_batches_in_flight(number, parallel.pipe_stages, accumulated)


def _pipeline_buffers(run: RunConfig, number: int, has_back: bool) -> int:
    """Tensors between stages: what has come in, what goes out, their gradients, and logits until they are replaced.

    DeepSpeed keeps a place for each of at least two micro-batches.
    """
    if not run.parallel.uses_pipeline:
        return 0
    hidden, places = activations.hidden_bytes(run), max(2, _in_flight(run, number))
    ends_alone = run.parallel.pipe_stages == 1
    received = 0 if number == 0 else 3
    if has_back:
        stale = places * activations.stored_logits_bytes(run)
        return stale + (0 if ends_alone else (places + received) * hidden)
    return (received + 1 + _in_flight(run, number)) * hidden
