"""Peak memory of a rank of each pipeline stage, in bytes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from math import ceil
from operator import mul
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.model.partition import LayerCounts, Stage, counts, plan
from megatron.model.spec import LayerSpec
from megatron.parallel.pipeline.schedule import BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS, schedule_of
from megatron.parallel.pipeline.simulation import Moment
from megatron.tools.planning.activations import Activations, Sizes, activations, sizes
from megatron.tools.planning.schedule_costs import micro_batches_in_flight, peaks, stages_that_keep_most
from megatron.tools.planning.states import States, stage_weights, states


class Working(NamedTuple):
    """Memory of micro-batches at the peak of a step."""

    activations: int
    """Activations, without the part that fits into the memory of gradients that do not exist yet."""
    logits: int
    buffers: int
    """Tensors of the pipeline engine between stages."""
    in_flight: int
    """Maximum number of micro-batches with kept activations."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of a rank by purpose."""

    parameters: int
    """Number of parameters that the rank computes with, regardless of where they are stored."""
    trained: int
    """Number of trained parameters."""
    states: States
    working: Working

    def parts(self) -> dict[str, int]:
        """Bytes by purpose. Memory of the optimizer step beyond the backward pass counts as buffers."""
        backward = self.working.activations + self.working.logits + self.working.buffers
        return {
            "weights": self.states.weights,
            "gradients": self.states.gradients,
            "optimizer": self.states.optimizer,
            "activations": self.working.activations,
            "logits": self.working.logits,
            "buffers": self.states.buffers + self.working.buffers + max(self.states.step - backward, 0),
        }

    @cached_property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts().values())


def stage_memory(run: RunConfig) -> list[Memory]:
    """Peak memory of a rank of each pipeline stage. Batch and vocabulary sizes of ``run`` must be known."""
    return [memory for _, memory in _of_stages(run, lambda first, last: range(first, last + 1))]


def distinct_stage_memory(run: RunConfig) -> Iterator[tuple[Stage, Memory]]:
    """Peak memory by stage; of consecutive equal stages only those that may need most."""
    return _of_stages(run, partial(stages_that_keep_most, schedule_of(run)))


def _of_stages(run: RunConfig, choose: Callable[[int, int], Iterable[int]]) -> Iterator[tuple[Stage, Memory]]:
    """Stages and their memory; ``choose`` selects from the first and the last number of consecutive equal stages."""
    micro_batch = activations(run)
    for _, equal in groupby(enumerate(plan(run)), key=lambda numbered: numbered[1].layers_of_chunks):
        (first, stage), *others = equal
        weights = stage_weights(run, stage)
        stage_states = states(run, weights)
        for number in choose(first, first + len(others)):
            working = _working(run, stage, number, micro_batch, stage_states.new_gradients)
            yield stage, Memory(weights.numel, weights.trained.numel, stage_states, working)


def _working(run: RunConfig, stage: Stage, number: int, micro_batch: Activations, new_gradients: int) -> Working:
    """The working memory of a rank of stage ``number``; ``new_gradients`` do not exist when a step begins."""
    if run.parallel.uses_pipeline:
        schedule = schedule_of(run).shortened
        moments, in_flight = peaks(schedule, number), micro_batches_in_flight(schedule, number)
        chunks = _chunks(run, stage, micro_batch, is_divided=schedule.divides_backward)
    else:
        moments = (Moment(BACKWARD, 0, run.train.gradient_accumulation_steps == 1, counts=(1, 0)),)
        in_flight, chunks = 1, _chunks(run, stage, micro_batch, is_divided=False)
    sizes = [size for chunk in chunks for size in (chunk.forward, chunk.deferred)]
    inside = _recomputed(run, chunks, micro_batch) + micro_batch.passing
    points: list[tuple[int, int]] = []
    for moment in moments:
        kept, chunk = sum(map(mul, moment.counts, sizes)), chunks[moment.chunk]
        pass_points = _needed(moment.kind, kept, inside, chunk, micro_batch)
        is_first = moment.is_first and moment.kind == BACKWARD
        points += _before_gradients(run, stage, pass_points, chunk, new_gradients) if is_first else pass_points
    activations, logits = max(points, key=sum)
    return Working(
        activations=activations,
        logits=logits,
        buffers=_pipeline_buffers(run, stage.has_head, bool(logits), micro_batch),
        in_flight=in_flight,
    )


class _Chunk(NamedTuple):
    """Activation bytes of one micro-batch in a model chunk of a stage."""

    num_blocks: int
    """Number of transformer layers."""
    last_elements: int
    """Parameters of the last transformer layer and the layers after it; of all layers if there is none."""
    blocks: int
    """Bytes kept by transformer layers."""
    forward: int
    """Bytes kept after the forward pass: of layers and embeddings, and the sent output on a CPU."""
    deferred: int
    """Bytes kept for deferred weight gradients."""
    has_head: bool


def _chunks(run: RunConfig, stage: Stage, micro_batch: Activations, *, is_divided: bool) -> list[_Chunk]:
    """The model chunks of ``stage``; ``is_divided`` if the schedule splits the backward pass."""
    chunks, last = [], len(stage.chunks) - 1
    for number, layers in enumerate(stage.layers_of_chunks):
        has_embedding, has_head = stage.has_embedding and number == 0, stage.has_head and number == last
        indices, counted = [index for index, layer in enumerate(layers) if layer.is_block], counts(layers)
        blocks = _of_chunk(run, len(indices), counted, micro_batch)
        forward = blocks + has_embedding * micro_batch.front
        if run.parallel.uses_pipeline and run.parallel.device == "cpu":  # gloo keeps what it sends
            forward += (not has_head) * micro_batch.hidden
        if run.parallel.uses_pipeline and run.activation.partition_activations:  # keeps a partition and the input
            forward += (not has_embedding) * micro_batch.hidden
        deferred = deferred_bytes(run, counted) if is_divided else 0
        last_elements = sum(layer.numel for layer in layers[indices[-1] if indices else 0 :])
        chunks.append(_Chunk(len(indices), last_elements, blocks, forward, deferred, has_head))
    return chunks


def _recomputed(run: RunConfig, chunks: Sequence[_Chunk], micro_batch: Activations) -> int:
    """Bytes of activations that are recomputed before a layer's backward pass."""
    if run.model.recomputes_attention:
        return micro_batch.scores
    together = run.activation.layers_together
    return together and min(together, max(chunk.num_blocks for chunk in chunks)) * micro_batch.layer


def _needed(kind: str, kept: int, inside: int, chunk: _Chunk, micro_batch: Activations) -> list[tuple[int, int]]:
    """(bytes of activations, bytes of logits) at the points of a pass at which memory may peak.

    ``kept`` are the bytes before the pass of that ``kind``, and ``inside`` the temporary bytes of a layer.
    """
    if kind == WEIGHT_GRADIENTS:
        return [(kept, 0)]
    if kind == INPUT_GRADIENTS:  # when it reaches the last layer, the others have deferred weight gradients
        blocks = max(chunk.num_blocks, 1)
        inside += max(chunk.deferred - chunk.forward, 0) * (blocks - 1) // blocks
    at_the_loss = [(kept + micro_batch.back, micro_batch.logits)] if chunk.has_head else []
    return [(kept + inside, 0), *at_the_loss]


def _before_gradients(
    run: RunConfig, stage: Stage, points: list[tuple[int, int]], chunk: _Chunk, new_gradients: int
) -> list[tuple[int, int]]:
    """Correct the peak ``points`` for the first backward pass of an iteration, which allocates gradients as it goes.

    The points are the last layer, after which its gradients and the head's exist; the loss, before all gradients; and
    the first layer, when only its own activations of this model ``chunk`` are left.
    """
    allocated = chunk.last_elements / max(stage.parameters, 1)
    groups = max(ceil(chunk.num_blocks / max(run.activation.layers_together, 1)), 1)
    (inside, _), *at_the_loss = points
    corrected = [
        (inside - chunk.blocks * (groups - 1) // groups, 0),
        (inside - round(new_gradients * (1 - min(allocated, 1))), 0),
    ]
    for back, logits in at_the_loss:
        beyond = back + logits - new_gradients
        corrected.append((max(beyond - logits, 0), min(logits, max(beyond, 0))))
    return corrected


def _of_chunk(run: RunConfig, num_blocks: int, layers: LayerCounts, micro_batch: Activations) -> int:
    """Bytes that the ``layers`` of a model chunk keep for a micro-batch."""
    if together := run.activation.layers_together:
        return ceil(num_blocks / together) * micro_batch.kept_input
    return sum(count * micro_batch.of_layers.get(layer.class_name, 0) for layer, count in layers)


def _pipeline_buffers(run: RunConfig, has_back: bool, at_the_loss: bool, micro_batch: Activations) -> int:
    """Bytes of tensors in transfer between stages, and of the last logits unless the peak is at the loss."""
    if not run.parallel.uses_pipeline:
        return 0
    on_the_way = _ON_THE_WAY * micro_batch.hidden if run.parallel.pipe_stages > 1 else 0
    return on_the_way + (has_back and not at_the_loss) * micro_batch.stored_logits


_ON_THE_WAY = 6
"""Number of hidden states or gradients being sent, or received early."""


def deferred_bytes(run: RunConfig, layers: LayerCounts) -> int:
    """Bytes kept for deferred weight gradients: inputs and output gradients of linear layers.

    Autograd keeps one more gradient of hidden states for each layer.
    """
    z = sizes(run)
    return z.element * sum(
        count * (z.stream * z.h + _deferred(z, layer, run.model.moe_router_topk))
        for layer, count in layers
        if layer.is_block
    )


def _deferred(z: Sizes, layer: LayerSpec, chosen: int) -> int:
    """Elements of inputs and output gradients of the linear layers in ``layer``."""
    total = 0
    for parameter in layer.parameters:
        experts = parameter.shape[0] if parameter.is_expert else 1
        if parameter.shard_dim is None or len(parameter.shape) < 2 + parameter.is_expert:
            continue
        inputs, outputs = parameter.shape[-1], parameter.numel // parameter.shape[-1] // experts
        if parameter.is_expert:  # assumes equally many tokens for each expert
            total += z.tokens * chosen * (inputs + outputs) // z.t
        elif parameter.shard_dim == len(parameter.shape) - 1:
            total += z.tokens * (inputs // z.t + outputs)
        else:
            total += z.stream * inputs + z.tokens * outputs // z.t
    return total
