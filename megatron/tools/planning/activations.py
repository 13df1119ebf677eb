"""Activation memory of one micro-batch on a rank, in bytes: kept for the backward pass, and needed while it runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megatron.config import ModelConfig, RunConfig
from megatron.config.model import ACTIVATIONS
from megatron.model.partition import layer_groups
from megatron.model.spec import LayerSpec, architecture_of
from megatron.ops.choices import (
    SHORTEST_BLOCK,
    AttentionKernel,
    DeviceFacts,
    attention_kernel,
    chunk_size,
    compiles_loss,
    computed_scores,
    rows_at_once,
)
from megatron.tools.planning.states import FP32, bytes_of


class Sizes(NamedTuple):
    """The shapes and types of one rank's tensors."""

    tokens: int
    """Tokens of a micro-batch on this rank, a sequence shard of them with context parallelism."""
    stream: int
    """Tokens of hidden states between parallel layers, a shard with sequence parallelism."""
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
    """Peak of the logits: themselves, their gradients, and some rows in the loss's type, or the head's gradient."""
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
    of_layers = {name: kept_of(z, layer) for name, layer in kinds.items()}
    blocks, scores = [layer for layer in kinds.values() if layer.is_block], 0
    for block in blocks:
        of_block = _scores_of(run, z, block)
        scores = max(scores, of_block)
        again = run.model.recomputes_attention
        of_layers[block.class_name] += _shared_keys(run, z) + (_kept_bias(run, z, block) if again else of_block)
    hidden = hidden_bytes(run, z)
    logits = (z.b * run.data.decoder_seq_length if run.model.encoder_num_layers else z.tokens) * (z.v // z.t)
    full = z.tokens * z.h * z.element
    # Tensor parallelism adds the gradient of its region's input, and a copy to be reduced; where it cuts the
    # sequence, parts of them, too.
    copies = 2 if z.t == 1 else 4 if z.stream == z.tokens else 6
    return Activations(
        layer=max(of_layers[block.class_name] for block in blocks),
        of_layers=of_layers,
        scores=scores,
        kept_input=_kept_input(run, hidden, z.t),
        front=sum(kept_of(z, layer) for layer in front),
        back=sum(kept_of(z, layer) for layer in back),
        logits=2 * logits * z.element + _loss_rows(run, z),
        stored_logits=logits * z.element,
        hidden=hidden,
        passing=max(_in_the_mlp(run, z) + copies * full, _in_attention(run, z) + full)
        + _gathered(run, z)
        + _quantized(run, z),
    )


def _in_the_mlp(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of the MLP's backward pass, without hidden states.

    The gradients of the second linear layer's input and weight; its input is freed before the next gradient of that
    size is allocated. A gated MLP has more tensors. An MLP in tiles has the gradients and activations of one tile.
    """
    columns, model = z.tokens * z.f * z.element // z.t, run.model
    activation, again = ACTIVATIONS[model.activation], model.recompute_mlp_activation * columns
    if model.tiled_mlp:
        return (activation.gradients + activation.kept) * columns // model.mlp_tiles(z.stream)
    if activation.gradients > 2:
        return activation.gradients * columns
    return again + columns + (0 if model.gradient_accumulation_fusion else z.h * z.f * z.element // z.t)


def _quantized(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of a linear layer in FP8: its input or the gradient of its output, scaled and quantized."""
    if run.model.fp8_format == "none":
        return 0
    columns = max(z.h, (2 if run.model.is_gated else 1) * z.f // z.t)
    return z.tokens * columns * (z.element + 1)


def _in_attention(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of attention's backward pass, less what the MLP and its norm have freed by then.

    With a window these are gradients of the keys that each chunk attends to; the gradients of queries replace contexts.
    A ring has keys and values of this rank and of another, and their gradients in fp32, sent and received; or those of
    all ranks if they are gathered. 0 where it is negligible.
    """
    model, ring, window = run.model, run.parallel.ring_size, _window(run, z)
    queries, keys = (count // ring for count in heads(run, z))
    in_the_mlp = 0 if model.tiled_mlp else ACTIVATIONS[model.activation].kept * z.tokens * z.f * z.element // z.t
    freed = in_the_mlp + 2 * z.tokens * z.h * z.element
    if ring == 1:
        chunk = chunk_size(window)
        return keys * (window + chunk) // chunk * z.element - freed if window else 0
    copies, sums = (ring + 1, ring + 2) if run.parallel.cp_comm_type == "all_gather" else (1 if ring == 2 else 2, 3)
    passed = keys * (copies * z.element + sums * FP32)
    in_blocks = model.reset_attention_mask or window
    in_the_kernel = 0 if in_blocks else queries * z.element // 2 + keys * z.element
    return passed + in_the_kernel + queries * (z.element + FP32) - freed


def kernel_of_attention(run: RunConfig, model: ModelConfig, z: Sizes) -> AttentionKernel:
    """The kernel of attention on the devices of the run."""
    causal = architecture_of(model).is_causal
    return attention_kernel(model, DeviceFacts(run.parallel.device), causal=causal, seq_length=z.s)


def _window(run: RunConfig, z: Sizes) -> int:
    """Tokens of a window whose attention is computed in chunks; 0 if there is none."""
    model = run.model
    kernel = kernel_of_attention(run, model, z)
    in_chunks = kernel.limits == "blocks" and SHORTEST_BLOCK < z.s and model.pre_tokens < z.s - 1
    return model.pre_tokens if in_chunks else 0


def heads(run: RunConfig, z: Sizes) -> tuple[int, int]:
    """Elements of the queries, and of the keys and values, of a rank's heads over full sequences."""
    groups = max(run.model.query_groups * z.n // run.model.num_attention_heads, 1)
    tokens = z.b * z.s * run.model.head_size
    return tokens * z.n, 2 * tokens * groups


def _columns(run: RunConfig) -> int:
    """Columns of all heads."""
    return run.model.num_attention_heads * run.model.head_size


def hidden_bytes(run: RunConfig, z: Sizes) -> int:
    """Hidden states between two stages; of T5 with the output of the encoder."""
    length = z.s + (run.data.decoder_seq_length if run.model.encoder_num_layers else 0)
    return z.stream * length // z.s * z.h * z.residual


def kept_of(z: Sizes, layer: LayerSpec) -> int:
    """Bytes that one rank keeps of ``layer``, without the scores of attention."""
    kept = layer.kept
    hidden = kept.residual * z.residual + kept.local * z.element + kept.masks * z.mask + kept.statistics * FP32
    return z.stream * hidden + z.tokens * kept.index_bytes + z.tokens * kept.sharded * z.element // z.t


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
    """The rows of logits that the loss takes together: their softmax, and a copy that is converted to the loss's type,
    or that torch makes of them where columns that pad the vocabulary lie between; none where it is compiled."""
    if compiles_loss(run.parallel.device):
        return 0
    columns = min(run.model.vocab_size, z.v) // z.t or 1  # without padding of the vocabulary
    element = z.element if run.model.fp16_lm_cross_entropy else FP32
    rows = min(z.tokens, rows_at_once(columns, run.parallel.device))
    has_copy = element != z.element or z.v != run.model.vocab_size
    return rows * columns * element * (2 if has_copy else 1)


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
    biased = model if has_bias else replace(model, position_embedding_type="none")
    kernel = kernel_of_attention(run, biased, z)
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
