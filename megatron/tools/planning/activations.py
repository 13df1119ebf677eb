"""Activation memory of a micro-batch on a rank, in bytes: kept for the backward pass, and temporary during it."""

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
    """Sizes and element sizes of one rank's tensors."""

    tokens: int
    """Tokens of a micro-batch on this rank; a sequence shard with context parallelism."""
    stream: int
    """Tokens of hidden states between tensor-parallel layers; a shard with sequence parallelism."""
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
    """Bytes per element of the residual stream."""
    mask: int
    """Bytes per element of a dropout mask; 0 without dropout."""


def sizes(run: RunConfig) -> Sizes:
    """The sizes of ``run``, whose batch and vocabulary sizes must be known."""
    model, parallel = run.model, run.parallel
    t, parts = parallel.model_parallel_size, parallel.sequence_ranks
    tokens = run.train.micro_batch_size * run.data.seq_length // parts
    element = bytes_of(run)
    on_cpu = parallel.device == "cpu"  # on which dropout masks have the dtype of activations
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
    """Activation memory of one micro-batch, in bytes."""

    layer: int
    """Kept by the transformer layer that keeps most, without full recomputation."""
    of_layers: Mapping[str, int]
    """Kept by each kind of layer, by class name, without full recomputation."""
    scores: int
    """Kept by the attention core in addition to query, key, value and context, unless it is recomputed."""
    kept_input: int
    """Kept by a group of recomputed layers: its input, a shard of the input, or nothing on the device."""
    front: int
    """Kept by the embeddings."""
    back: int
    """Kept by the layers after the transformer layers, without the logits."""
    logits: int
    """Peak in the loss: logits, their gradients, and some rows in the dtype of the loss, or the head's gradient."""
    stored_logits: int
    """The logits."""
    hidden: int
    """Hidden states between two stages."""
    passing: int
    """Temporary memory of a layer's backward pass: gradients of some of its tensors."""


def activations(run: RunConfig) -> Activations:
    """The activation memory of a micro-batch of ``run`` on one rank."""
    z, (front, *groups, back) = sizes(run), layer_groups(run.model)
    kinds = {layer.class_name: layer for group in groups for layer in group}
    of_layers = {name: kept_of(z, layer) for name, layer in kinds.items()}
    blocks, scores = [layer for layer in kinds.values() if layer.is_block], 0
    for block in blocks:
        block_scores = _block_scores(run, z, block)
        scores = max(scores, block_scores)
        kept = _kept_bias(run, z, block) if run.model.recomputes_attention else block_scores
        of_layers[block.class_name] += _shared_keys(run, z) + kept
    hidden = hidden_bytes(run, z)
    logits = (z.b * run.data.decoder_seq_length if run.model.encoder_num_layers else z.tokens) * (z.v // z.t)
    full = z.tokens * z.h * z.element
    # Tensor parallelism adds the gradient of the region's input, and a copy for the reduction; sequence parallelism
    # also shards of both.
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

    These are gradients of the second linear layer's input and weight; its input is freed before the next gradient of
    that size is allocated. A gated MLP has more tensors. A tiled MLP has gradients and activations of one tile.
    """
    columns, model = z.tokens * z.f * z.element // z.t, run.model
    activation, recomputed = ACTIVATIONS[model.activation], model.recompute_mlp_activation * columns
    if model.tiled_mlp:
        return (activation.gradients + activation.kept) * columns // model.mlp_tiles(z.stream)
    if activation.gradients > 2:
        return activation.gradients * columns
    return recomputed + columns + (0 if model.gradient_accumulation_fusion else z.h * z.f * z.element // z.t)


def _quantized(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of a linear layer in FP8: its input or output gradient, scaled and quantized."""
    if run.model.fp8_format == "none":
        return 0
    columns = max(z.h, (2 if run.model.is_gated else 1) * z.f // z.t)
    return z.tokens * columns * (z.element + 1)


def _in_attention(run: RunConfig, z: Sizes) -> int:
    """Temporary memory of attention's backward pass, minus the memory freed by then by the MLP and its norm.

    With a window these are gradients of the keys that each chunk attends to; gradients of queries replace contexts. A
    ring has keys and values of this rank and of another one, and their gradients in fp32, sent and received; with
    all-gather it has those of all ranks. 0 if it is negligible.
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
    """The attention kernel on the devices of the run."""
    causal = architecture_of(model).is_causal
    return attention_kernel(model, DeviceFacts(run.parallel.device), causal=causal, seq_length=z.s)


def _window(run: RunConfig, z: Sizes) -> int:
    """Window size in tokens if attention is computed in chunks; otherwise 0."""
    model = run.model
    kernel = kernel_of_attention(run, model, z)
    in_chunks = kernel.limits == "blocks" and SHORTEST_BLOCK < z.s and model.pre_tokens < z.s - 1
    return model.pre_tokens if in_chunks else 0


def heads(run: RunConfig, z: Sizes) -> tuple[int, int]:
    """Elements of queries, and of keys and values, of a rank's heads for full sequences."""
    groups = max(run.model.query_groups * z.n // run.model.num_attention_heads, 1)
    tokens = z.b * z.s * run.model.head_size
    return tokens * z.n, 2 * tokens * groups


def _columns(run: RunConfig) -> int:
    """Columns of all heads."""
    return run.model.num_attention_heads * run.model.head_size


def hidden_bytes(run: RunConfig, z: Sizes) -> int:
    """Bytes of hidden states between two stages; for T5 including the output of the encoder."""
    length = z.s + (run.data.decoder_seq_length if run.model.encoder_num_layers else 0)
    return z.stream * length // z.s * z.h * z.residual


def kept_of(z: Sizes, layer: LayerSpec) -> int:
    """Bytes that ``layer`` keeps on one rank, without attention scores."""
    kept = layer.kept
    hidden = kept.residual * z.residual + kept.local * z.element + kept.masks * z.mask + kept.statistics * FP32
    return z.stream * hidden + z.tokens * kept.index_bytes + z.tokens * kept.sharded * z.element // z.t


def _shared_keys(run: RunConfig, z: Sizes) -> int:
    """Bytes kept for key and value heads that several ranks share, beyond this rank's part of them."""
    model, parts = run.model, run.parallel.ulysses_size
    beyond = max(parts - model.query_groups / z.t, 0)
    return int(beyond * z.tokens * model.head_size * z.element * (3 if model.qk_layernorm else 2))


def _gathered(run: RunConfig, z: Sizes) -> int:
    """Bytes of gathered queries, keys and values, if there are more ranks than key and value heads."""
    model = run.model
    columns = (model.num_attention_heads + 2 * model.query_groups) * model.head_size
    return z.tokens * columns * z.element if z.t > model.query_groups else 0


def _loss_rows(run: RunConfig, z: Sizes) -> int:
    """Bytes of the logit rows that the uncompiled loss processes at a time: their softmax, and a copy if the dtype is
    converted or padding columns make the rows non-contiguous; 0 if the loss is compiled."""
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


def _block_scores(run: RunConfig, z: Sizes, block: LayerSpec) -> int:
    """Bytes kept by the attention cores of ``block`` in addition to query, key, value and context."""
    self_size, cross_size = block.attention_size - block.cross_attention_size, block.cross_attention_size
    self_scores = _scores(run, z) * self_size if self_size else 0
    cross_scores = _scores(run, z, has_bias=False) * cross_size if cross_size else 0
    return (self_scores + cross_scores) // _columns(run)


def _kept_bias(run: RunConfig, z: Sizes, block: LayerSpec) -> int:
    """Bytes of the relative position bias kept to recompute attention; in the encoder for each sample."""
    if not run.model.has_relative_positions:
        return 0
    scores = z.n * z.s**2 * (block.attention_size - block.cross_attention_size) // _columns(run)
    return scores * z.element * (1 if block.cross_attention_size else z.b)


def _scores(run: RunConfig, z: Sizes, *, has_bias: bool = True) -> int:
    """Bytes kept by an attention core in addition to query, key, value and context."""
    model, ring = run.model, run.parallel.ring_size
    if ring > 1:  # only the logsumexp
        return z.b * z.n * z.s // ring * FP32
    biased = model if has_bias else replace(model, position_embedding_type="none")
    kernel = kernel_of_attention(run, biased, z)
    head_scores, queries = computed_scores(model, kernel, z.s), z.b * z.n * z.s * model.head_size
    scores = z.b * z.n * head_scores
    in_chunks = head_scores < z.s**2
    groups = max(model.query_groups * z.n // model.num_attention_heads, 1) if kernel.shares_keys else z.n
    padded = 0
    if in_chunks:  # keys and values, padded before the first chunk and after the last one
        padding = model.pre_tokens + -z.s % chunk_size(model.pre_tokens)
        padded += 2 * z.b * (z.s + padding) * model.head_size * groups * z.element
    in_documents = model.reset_attention_mask and kernel.limits == "blocks" and z.s > SHORTEST_BLOCK
    if in_documents or (in_chunks and kernel.name == "flash"):
        padded += queries * z.element  # contexts of documents or chunks, in addition to their concatenation
    dropout = bool(model.attention_dropout)
    on_cpu = run.parallel.device == "cpu"
    mask = (z.element if on_cpu else 1) if dropout else 0
    if model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling:
        copies = queries * (z.element if z.element == FP32 or not model.attention_softmax_in_fp32 else 2 * FP32)
        weights = z.element if dropout or z.element != FP32 else 0
        return scores * (FP32 + mask + weights) + copies + padded
    if kernel.keeps_scores:  # torch's unfused kernel computes in fp32
        # T5 with relative positions does not scale query and key.
        copies = 3 if z.element != FP32 else 0 if model.has_relative_positions else 2
        return scores * (3 if dropout else 1) * FP32 + copies * queries * FP32 + padded
    return z.b * z.n * z.s * FP32 + padded
