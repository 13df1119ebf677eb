"""Peak memory of a rank of each pipeline stage, in bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.model.attention_kernel import SHORTEST_BLOCK, DeviceFacts, attention_kernel, chunk_size, computed_scores
from megatron.model.spec import LayerSpec
from megatron.parallel.pipeline.partition import Stage, layer_groups, plan
from megatron.parallel.pipeline.schedule import (
    BACKWARD,
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Held,
    Moment,
    schedule_of,
)
from megatron.parallel.tensor import rows_at_once
from megatron.tools.planning.states import FP32, States, bytes_of, numel, stage_weights, states, trained


class Sizes(NamedTuple):
    """The shapes and types of one rank's tensors."""

    tokens: int
    """Tokens of a micro-batch on this rank, a sequence shard of them with context parallelism."""
    stream: int
    """Of these, those of hidden states between parallel layers, a shard with sequence parallelism."""
    h: int
    f: int
    n: int
    """Heads of this rank."""
    s: int
    """Sequence length."""
    b: int
    t: int
    v: int
    element: int
    residual: int
    """Bytes of an element of the residual stream."""
    mask: int
    """Bytes of an element of a dropout mask; 0 without dropout."""


def sizes(run: RunConfig) -> Sizes:
    """The sizes of ``run``, whose batch and vocabulary size are known."""
    model, parallel = run.model, run.parallel
    t, parts = parallel.model_parallel_size, parallel.sequence_ranks
    tokens = run.train.micro_batch_size * run.data.seq_length // parts
    element = bytes_of(run)
    on_cpu = parallel.device == "cpu"  # where dropout masks have the type of the activations
    return Sizes(
        tokens=tokens,
        stream=tokens // t if parallel.sequence_parallel else tokens,
        h=model.hidden_size,
        f=model.moe_router_topk * model.expert_size or model.ffn_hidden_size,
        n=model.num_attention_heads // (t * parallel.ulysses_size),
        s=run.data.seq_length,
        b=run.train.micro_batch_size,
        t=t,
        v=model.padded_vocab_size,
        element=element,
        residual=FP32 if model.fp32_residual_connection else element,
        mask=(element if on_cpu else 1) if model.hidden_dropout else 0,
    )


class Activations(NamedTuple):
    """Bytes of one micro-batch."""

    layer: int
    """Kept by a transformer layer, without full recomputation; by the one that keeps most."""
    of_layers: Mapping[str, int]
    """The same of each kind of layer, by its class name."""
    scores: int
    """Kept by the attention core besides query, key, value and context, unless it is recomputed."""
    kept_input: int
    """Kept by a group of recomputed layers: its input, a shard of it, or nothing on the device."""
    front: int
    """Kept by the embeddings."""
    back: int
    """Kept by the layers after the transformer layers, without the logits."""
    logits: int
    """Peak of the logits: themselves, their gradients, and some rows in the loss's type."""
    stored_logits: int
    """The logits themselves."""
    hidden: int
    """Hidden states between two stages."""
    passing: int
    """Temporary memory of a layer's backward pass: gradients of a few of its tensors."""


def activations(run: RunConfig) -> Activations:
    """What one rank keeps of a micro-batch of ``run``."""
    z, (front, *groups, back) = sizes(run), layer_groups(run.model)
    kinds = {layer.class_name: layer for group in groups for layer in group}
    of_layers = {name: _kept(z, [layer]) for name, layer in kinds.items()}
    blocks, scores = [layer for layer in kinds.values() if layer.is_block], 0
    for block in blocks:
        of_block = _scores_of(run, z, block)
        scores = max(scores, of_block)
        again = run.model.recomputes_attention
        of_layers[block.class_name] += _shared_keys(run, z) + (_kept_bias(run, z, block) if again else of_block)
    read, predicted = _sequences(run, z)
    hidden = z.stream * read // z.s * z.h * z.residual
    logits = z.b * predicted * (z.v // z.t)
    whole = z.tokens * z.h * z.element
    # Tensor parallelism adds the gradient of its region's input, and a copy to be reduced; where it cuts the
    # sequence, parts of them, too.
    copies = 2 if z.t == 1 else 4 if z.stream == z.tokens else 6
    return Activations(
        layer=max(of_layers[block.class_name] for block in blocks),
        of_layers=of_layers,
        scores=scores,
        kept_input=_kept_input(run, hidden, z.t),
        front=_kept(z, front),
        back=_kept(z, back),
        logits=2 * logits * z.element + _loss_rows(run, z),
        stored_logits=logits * z.element,
        hidden=hidden,
        passing=max(_in_the_mlp(run, z) + copies * whole, _in_attention(run, z) + whole) + _gathered(run, z),
    )


def _in_the_mlp(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of the MLP's backward pass, beside hidden states.

    The gradient of the second product's input, and that of its weight before it is added up: the input of the product
    is freed before the next gradient of that size is there. Gates are computed from more tensors. Of an MLP in tiles
    there are gradients of one of them, and what it keeps.
    """
    columns, model = z.tokens * z.f * z.element // z.t, run.model
    if model.tiled_mlp:
        gradients, kept = 4 if model.swiglu else 2, 4 if model.geglu else 3 if model.swiglu else 2
        return (gradients + kept) * columns // model.mlp_tiles(z.stream)
    if model.swiglu:
        return 4 * columns
    return columns + (0 if model.gradient_accumulation_fusion else z.h * z.f * z.element // z.t)


def _in_attention(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of attention's backward pass, less what has been freed by then, of the MLP and its norm.

    In a window there are gradients of the keys that each chunk has seen; those of queries take the place of contexts.
    In a ring there are keys and values of this rank and of another, their gradient, in fp32, and the one that follows
    them, sent and received; or those of all ranks. 0 where it is little.
    """
    model, ring, window = run.model, run.parallel.ring_size, _window(run, z)
    queries, keys = (count // ring for count in _heads(run, z))
    in_the_mlp = 0 if model.tiled_mlp else (3 if model.swiglu else 2) * z.tokens * z.f * z.element // z.t
    freed = in_the_mlp + 2 * z.tokens * z.h * z.element
    if ring == 1:
        chunk = chunk_size(window)
        return keys * (window + chunk) // chunk * z.element - freed if window else 0
    copies, sums = (ring + 1, ring + 2) if run.parallel.cp_comm_type == "all_gather" else (1 if ring == 2 else 2, 3)
    passed = keys * (copies * z.element + sums * FP32)
    in_blocks = model.reset_attention_mask or window
    in_the_kernel = 0 if in_blocks else queries * z.element // 2 + keys * z.element
    return passed + in_the_kernel + queries * (z.element + FP32) - freed


def _window(run: RunConfig, z: Sizes) -> int:
    """Tokens of a window whose attention is computed in chunks; 0 if there is none."""
    model = run.model
    kernel = attention_kernel(model, DeviceFacts(run.parallel.device), seq_length=z.s)
    in_chunks = kernel.limits == "blocks" and SHORTEST_BLOCK < z.s and model.pre_tokens < z.s - 1
    return model.pre_tokens if in_chunks else 0


def _heads(run: RunConfig, z: Sizes) -> tuple[int, int]:
    """Elements of the queries, and of the keys and values, of a rank's heads and whole sequences."""
    groups = max(run.model.query_groups * z.n // run.model.num_attention_heads, 1)
    tokens = z.b * z.s * run.model.head_size
    return tokens * z.n, 2 * tokens * groups


def _columns(run: RunConfig) -> int:
    """Columns of all heads."""
    return run.model.num_attention_heads * run.model.head_size


def _sequences(run: RunConfig, z: Sizes) -> tuple[int, int]:
    """Tokens of a sample that layers pass on at most, and those of which there are logits."""
    if not run.model.encoder_num_layers:
        return z.s, z.tokens // z.b
    return z.s + run.data.decoder_seq_length, run.data.decoder_seq_length


def _kept(z: Sizes, layers: Sequence[LayerSpec]) -> int:
    """Bytes that one rank keeps of ``layers``, without the scores of attention."""
    total = 0
    for kept in (layer.kept for layer in layers):
        hidden = kept.residual * z.residual + kept.local * z.element + kept.masks * z.mask + kept.statistics * FP32
        total += z.stream * hidden + z.tokens * kept.index_bytes
        total += z.tokens * kept.sharded * z.element // z.t
    return total


def _shared_keys(run: RunConfig, z: Sizes) -> int:
    """What a rank keeps of a key and value head that it shares with others, beyond its part of them."""
    model, parts = run.model, run.parallel.ulysses_size
    beyond = max(parts - model.query_groups / z.t, 0)
    return int(beyond * z.tokens * model.head_size * z.element * (3 if model.qk_layernorm else 2))


def _gathered(run: RunConfig, z: Sizes) -> int:
    """The queries, keys and values of all ranks, where there are more ranks than key and value heads."""
    model = run.model
    columns = (model.num_attention_heads + 2 * model.query_groups) * model.head_size
    return z.tokens * columns * z.element if z.t > model.query_groups else 0


def _loss_rows(run: RunConfig, z: Sizes) -> int:
    """The rows of logits that the loss converts together, and a copy in their own type."""
    columns = min(run.model.vocab_size, z.v) // z.t or 1  # without those that pad the vocabulary
    element = z.element if run.model.fp16_lm_cross_entropy else FP32
    rows = min(z.tokens, rows_at_once(columns, run.parallel.device))
    return rows * columns * element * (1 if element == z.element else 2)


def _kept_input(run: RunConfig, hidden: int, t: int) -> int:
    if run.activation.checkpoint_in_cpu:
        return 0
    return hidden // (t if run.activation.partition_activations else 1)


def _scores_of(run: RunConfig, z: Sizes, block: LayerSpec) -> int:
    """Kept by the attention cores of ``block`` besides query, key, value and context."""
    own, across = block.attention_size - block.cross_attention_size, block.cross_attention_size
    parts = [_scores(run, z) * own if own else 0, _scores(run, z, has_bias=False) * across if across else 0]
    return sum(parts) // _columns(run)


def _kept_bias(run: RunConfig, z: Sizes, block: LayerSpec) -> int:
    """The bias of relative positions that a layer keeps to recompute attention, of each sample in the encoder."""
    if not run.model.has_relative_positions:
        return 0
    scores = z.n * z.s**2 * (block.attention_size - block.cross_attention_size) // _columns(run)
    return scores * z.element * (1 if block.cross_attention_size else z.b)


def _scores(run: RunConfig, z: Sizes, *, has_bias: bool = True) -> int:
    """Kept by an attention core besides query, key, value and context."""
    model, ring = run.model, run.parallel.ring_size
    if ring > 1:  # only the logarithms of sums
        return z.b * z.n * z.s // ring * FP32
    without_bias = replace(model, position_embedding_type="none")
    kernel = attention_kernel(model if has_bias else without_bias, DeviceFacts(run.parallel.device), seq_length=z.s)
    of_head, queries = computed_scores(model, kernel, z.s), z.b * z.n * z.s * model.head_size
    scores = z.b * z.n * of_head
    in_chunks = of_head < z.s**2
    groups = max(model.query_groups * z.n // model.num_attention_heads, 1) if kernel.shares_keys else z.n
    padded = 0
    if in_chunks:  # key, value, room before the first chunk and after the last one
        room = model.pre_tokens + -z.s % chunk_size(model.pre_tokens)
        padded += 2 * z.b * (z.s + room) * model.head_size * groups * z.element
    apart = model.reset_attention_mask and kernel.limits == "blocks" and z.s > SHORTEST_BLOCK
    if apart or (in_chunks and kernel.name == "flash"):
        padded += queries * z.element  # the context of each document or chunk, besides all of them together
    dropout = bool(model.attention_dropout)
    on_cpu = run.parallel.device == "cpu"
    mask = (z.element if on_cpu else 1) if dropout else 0
    if model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling:
        copies = queries * (z.element if z.element == FP32 or not model.attention_softmax_in_fp32 else 2 * FP32)
        weights = z.element if dropout or z.element != FP32 else 0
        return scores * (FP32 + mask + weights) + copies + padded
    if kernel.keeps_scores:  # torch does it step by step, in fp32
        # T5's query and key are not scaled where it has relative positions.
        copies = 3 if z.element != FP32 else 0 if model.has_relative_positions else 2
        return scores * (3 if dropout else 1) * FP32 + copies * queries * FP32 + padded
    return z.b * z.n * z.s * FP32 + padded


@dataclass(frozen=True)
class Working:
    """Memory of the micro-batches at the peak of a step."""

    activations: int
    logits: int
    buffers: int
    """The pipeline engine's tensors between stages."""
    in_flight: int
    """Micro-batches whose activations are kept at a time."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of a rank by purpose."""

    parameters: int
    """Elements that the rank computes with, wherever they are stored."""
    trained: int
    """Those of them that training changes."""
    states: States
    working: Working

    def parts(self) -> dict[str, int]:
        """Bytes by purpose. What the optimizer step needs beyond the backward pass counts as buffers."""
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
    """Peak memory of a rank of each pipeline stage; ``owner`` as in ``states``.

    ``run`` has its batch and vocabulary settled.
    """
    found, kept = [], activations(run)
    for number, stage in enumerate(plan(run)):
        weights = stage_weights(run, stage)
        held = states(run, weights, owner)
        found.append(Memory(numel(weights), numel(trained(weights)), held, working(run, stage, number, kept)))
    return found


def working(run: RunConfig, stage: Stage, number: int, micro_batch: Activations) -> Working:
    """The working memory of a rank of ``stage``, which is the one of that number."""
    moments = schedule_of(run).shortened.moments(number) if run.parallel.uses_pipeline else [_ONLY]
    activations, logits = max((_needed(run, stage, moment, micro_batch) for moment in moments), key=sum)
    in_flight = max(ceil(sum(map(sum, moment.held)) / len(moment.held)) for moment in moments)
    return Working(
        activations=activations,
        logits=logits,
        buffers=_pipeline_buffers(run, number, stage.has_head, bool(logits), micro_batch, in_flight),
        in_flight=in_flight,
    )


_ONLY = Moment(BACKWARD, 0, (Held(1, 0),))
"""Of a model without pipeline stages."""


def _needed(run: RunConfig, stage: Stage, moment: Moment, micro_batch: Activations) -> tuple[int, int]:
    """Activations with what a pass needs beside those that are kept before it, and logits."""
    layers, together = max(map(_blocks, stage.layers_of_chunks)), run.activation.layers_together
    of_chunks = [_of_chunk(run, layers, micro_batch) for layers in stage.layers_of_chunks]
    of_chunks[0] += micro_batch.front if stage.has_embedding else 0
    products = [_put_off(run, layers) for layers in stage.layers_of_chunks]
    if run.parallel.uses_scheduled_engine:  # keeps the input and the output of a chunk, too
        for phase in range(len(of_chunks)):
            is_first, is_last = stage.has_embedding and phase == 0, stage.has_head and phase == len(of_chunks) - 1
            of_chunks[phase] += (2 - is_first - is_last) * micro_batch.hidden
    kept = sum(
        one.forward * activations + one.products * product
        for one, activations, product in zip(moment.held, of_chunks, products, strict=True)
    )
    if moment.kind == WEIGHT_GRADIENTS:
        return kept, 0
    again = min(together, layers) * micro_batch.layer  # recomputed before the layer's backward pass
    if run.model.recomputes_attention:
        again = micro_batch.scores
    inside = again + micro_batch.passing
    if moment.kind == INPUT_GRADIENTS:  # before its last layer the others have put off their products
        blocks = max(_blocks(stage.layers_of_chunks[moment.phase]), 1)
        inside += max(products[moment.phase] - of_chunks[moment.phase], 0) * (blocks - 1) // blocks
    at_the_loss = micro_batch.logits + micro_batch.back
    if stage.has_head and moment.phase == len(of_chunks) - 1 and at_the_loss > inside:
        return kept + micro_batch.back, micro_batch.logits
    return kept + inside, 0


def _of_chunk(run: RunConfig, layers: Sequence[LayerSpec], micro_batch: Activations) -> int:
    """What a forward pass through these layers of a model chunk keeps of a micro-batch."""
    if together := run.activation.layers_together:
        return ceil(_blocks(layers) / together) * micro_batch.kept_input
    return sum(micro_batch.of_layers.get(layer.class_name, 0) for layer in layers)


def _blocks(layers: Sequence[LayerSpec]) -> int:
    return sum(layer.is_block for layer in layers)


def _put_off(run: RunConfig, layers: Sequence[LayerSpec]) -> int:
    """What the gradients of weights that are put off are computed from: inputs of linear layers, and gradients of their
    outputs. Autograd holds on to one more gradient of hidden states for each layer. Products of experts in one kernel
    (``StackedLinear``) are not put off."""
    z, total = sizes(run), 0
    in_one_kernel = run.model.moe_grouped_gemm and run.parallel.device == "cuda" and run.precision.dtype == "bf16"
    for layer in (layer for layer in layers if layer.is_block):
        total += z.stream * z.h
        for parameter in layer.parameters:
            experts = parameter.shape[0] if parameter.is_expert else 1
            if parameter.shard_dim is None or len(parameter.shape) < 2 + parameter.is_expert:
                continue
            if parameter.is_expert and in_one_kernel:
                continue
            inputs, outputs = parameter.shape[-1], parameter.numel // parameter.shape[-1] // experts
            if parameter.is_expert:  # the same number of tokens for each
                total += z.tokens * run.model.moe_router_topk * (inputs + outputs) // z.t
            elif parameter.shard_dim == len(parameter.shape) - 1:
                total += z.tokens * (inputs // z.t + outputs)
            else:
                total += z.stream * inputs + z.tokens * outputs // z.t
    return total * z.element


def _pipeline_buffers(
    run: RunConfig, number: int, has_back: bool, at_the_loss: bool, micro_batch: Activations, in_flight: int
) -> int:
    """Tensors between stages: received and sent ones, their gradients, and logits until they are replaced.

    DeepSpeed keeps a place for each of at least two micro-batches. The logits in it stay, but with DualPipeV and the
    engine of further schedules, until the next ones come; at the loss, those of the current micro-batch are counted as
    logits.
    """
    if not run.parallel.uses_pipeline:
        return 0
    places, received = max(2, in_flight), 0 if number == 0 else 3
    if run.parallel.uses_scheduled_engine:
        return _ON_THE_WAY * micro_batch.hidden + (has_back and not at_the_loss) * micro_batch.stored_logits
    if has_back:
        between = 0 if run.parallel.pipe_stages == 1 else (places + received) * micro_batch.hidden
        kept = 1 if run.parallel.uses_dualpipev else places
        return (kept - at_the_loss) * micro_batch.stored_logits + between
    return (received + 1 + in_flight) * micro_batch.hidden


_ON_THE_WAY = 6
"""Hidden states or gradients being sent, or received early, with schedules other than DeepSpeed's."""
