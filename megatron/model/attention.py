"""Tensor-parallel attention: projections around an attention core.

A core takes query [b, n, s, d], key and value [b, g, s, d], and limits: segment ids [b, s] or None. It returns the
context [b, n, s, d], and handles dropout and selective recomputation. It knows nothing about the projections.

b batch, s sequence, h hidden, n query heads of this rank, g key and value heads of this rank, d size of a head
"""

import math
from collections.abc import Callable, Sequence

import deepspeed
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.rotary import RotaryPositions
from megatron.model.weights import column_parallel, head_norm, row_parallel
from megatron.ops.attention import Attention, chosen_kernel
from megatron.ops.partial_attention import PartialAttention
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import all_to_all
from megatron.parallel.sequence.ring_attention import RingAttention
from megatron.parallel.tensor.mappings import gather_from_sequence_parallel_region
from megatron.parallel.tensor.random import random_stream


class ParallelSelfAttention(nn.Module):
    """Self-attention: hidden [b, s, h] -> hidden [b, s, h], or [s, b, h] for ``--shape-order SBH``.

    With ``segment_ids`` [b, s] a token attends to its own segment only. ``causal`` attention is limited to earlier
    tokens, at most ``pre_tokens`` back; otherwise a token attends to its entire segment. In T5, ``segment_ids`` is an
    attention mask.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__()
        name, h, groups = f"layers.{layer_number}.attention", config.hidden_size, config.query_groups
        queries = config.num_attention_heads // groups
        self.heads = Heads(config, layout.tensor_group, (queries, 1, 1), groups)
        self.query_key_value = column_parallel(
            config, layout, f"{name}.query_key_value", h, self.heads.columns, has_bias=config.qkv_bias
        )
        self.q_layernorm = head_norm(config, layout) if config.qk_layernorm else nn.Identity()
        self.k_layernorm = head_norm(config, layout) if config.qk_layernorm else nn.Identity()
        self.rotary: nn.Module | None = RotaryPositions(config, layout) if config.has_rotary_embedding else None
        self.core = attention_core(config, layout, layer_number=layer_number, causal=causal)
        self.dense = row_parallel(config, layout, f"{name}.dense", config.num_attention_heads * config.head_size, h)

    def forward(self, hidden: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        query, key, value = self.heads.split(self.query_key_value(hidden))
        query, key, value = self.heads.batch_first(self.q_layernorm(query), self.k_layernorm(key), value)
        if self.rotary is not None:
            query, key = self.rotary(query, key, segment_ids)
        return self.dense(self.heads.merge(self.core(query, key, value, segment_ids)))


class CrossAttention(nn.Module):
    """Cross-attention: decoder hidden [b, r, h], encoder output [b, s, h] and a mask -> hidden [b, r, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__()
        name, h, count = f"layers.{layer_number}.inter_attention", config.hidden_size, config.num_attention_heads
        self.query_heads = Heads(config, layout.tensor_group, (1,), count)
        self.key_value_heads = Heads(config, layout.tensor_group, (1, 1), count)
        self.query = column_parallel(config, layout, f"{name}.query", h, self.query_heads.columns)
        self.key_value: nn.Module = column_parallel(
            config, layout, f"{name}.key_value", h, self.key_value_heads.columns
        )
        self.core = MaskedCore(config)
        self.dense = row_parallel(config, layout, f"{name}.dense", self.query_heads.columns, h)

    def forward(self, hidden: Tensor, encoder_output: Tensor, mask: Tensor) -> Tensor:
        query = self.query_heads.split(self.query(hidden))
        key_value = self.key_value_heads.split(self.key_value(encoder_output))
        context = self.core(*self.key_value_heads.batch_first(*query, *key_value), mask)
        return self.dense(self.query_heads.merge(context))


class Heads:
    """Splits the output of a column-parallel projection, laid out as [groups, heads of a group, d], into heads.

    ``sizes`` are the heads per group of each part: (queries, 1, 1) for query, key and value. A rank has complete
    groups, unless there are more ranks than groups. ``batch_first`` converts from ``--shape-order SBH`` for the core.
    """

    def __init__(self, config: ModelConfig, group: ProcessGroup, sizes: Sequence[int], groups: int):
        self.sizes, self.head_size, self.group = tuple(sizes), config.head_size, group
        self.columns = groups * sum(sizes) * config.head_size
        self.ranks_per_group = max(group.size() // groups, 1)
        self.is_sequence_first = config.sequence_dim == 0
        # A view that is saved for the backward pass keeps the columns of all parts alive, so it is copied. ``flatten``
        # copies grouped queries anyway; RoPE does not save its input.
        is_grouped, is_kept = max(sizes) > 1, config.qk_layernorm or not config.has_rotary_embedding
        query, key, value = self.ranks_per_group > 1 and is_kept, is_grouped and is_kept, is_grouped or not is_kept
        self.contiguous = (query, key, value) if len(self.sizes) == 3 else (False,) * len(self.sizes)

    def split(self, columns: Tensor) -> tuple[Tensor, ...]:
        """columns [b, s, columns of this rank] -> queries [b, s, n, d], keys and values [b, s, g, d]."""
        if self.ranks_per_group > 1:  # a rank has only some columns of its group, and needs its key and value as well
            columns = gather_from_sequence_parallel_region(columns, self.group, -1)
        groups = columns.unflatten(-1, (-1, sum(self.sizes), self.head_size))
        if self.ranks_per_group > 1:
            groups = groups.narrow(2, self.group.rank() // self.ranks_per_group, 1)
        if max(self.sizes) == 1:
            parts = groups.unbind(3)
        else:
            parts = tuple(part.flatten(2, 3) for part in groups.split(self.sizes, dim=3))
        if self.ranks_per_group > 1:
            query, *others = parts
            parts = (query.chunk(self.ranks_per_group, 2)[self.group.rank() % self.ranks_per_group], *others)
        return tuple(
            part.contiguous() if is_copied else part for part, is_copied in zip(parts, self.contiguous, strict=True)
        )

    def batch_first(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """[b, s, n, d], or [s, b, n, d], each -> [b, n, s, d]."""
        if self.is_sequence_first:
            return tuple(part.permute(1, 2, 0, 3) for part in parts)
        return tuple(part.transpose(1, 2) for part in parts)

    def merge(self, context: Tensor) -> Tensor:
        """context [b, n, s, d] -> [b, s, n d], or [s, b, n d]."""
        return context.permute((2, 0, 1, 3) if self.is_sequence_first else (0, 2, 1, 3)).flatten(2)


def attention_core(config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool) -> nn.Module:
    """The attention core for the sequence sharding of ``layout``: local, ring, Ulysses or both; masked for T5."""
    if config.encoder_num_layers:
        return MaskedCore(config)
    core: nn.Module
    if layout.ring_group:
        core = RingCore(config, layout.ring_group, gathers=layout.ring_gathers, causal=causal)
    else:
        core = LocalCore(config, layer_number=layer_number, causal=causal)
    return UlyssesCore(core, layout.ulysses_group) if layout.ulysses_group else core


class AttentionCore(nn.Module):
    """Base class of attention cores: per-rank dropout and selective recomputation around ``attend``."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
    """(query, key, value, limits, dropout) -> context: scores, softmax and dropout."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout, self.recomputes = config.attention_dropout, config.recomputes_attention

    def forward(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None = None) -> Tensor:
        tensors = (query, key, value) if limits is None else (query, key, value, limits)
        if self.recomputes and self.training:
            return deepspeed.checkpointing.checkpoint(self._attend, *tensors)
        return self._attend(*tensors)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None = None) -> Tensor:
        if not (self.training and self.dropout):
            return self.attend(query, key, value, limits, 0.0)
        with random_stream(per_rank=True):  # ranks hold different heads, and need different dropout
            return self.attend(query, key, value, limits, self.dropout)


class LocalCore(AttentionCore):
    """Attention core for a rank that has the entire sequence."""

    def __init__(self, config: ModelConfig, *, layer_number: int, causal: bool):
        super().__init__(config)
        self.attention = Attention(config, causal=causal, layer_number=layer_number)
        self.uses_segments = has_limits(config, causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, dropout: float) -> Tensor:
        return self.attention(query, key, value, limits if self.uses_segments else None, dropout)


class RingCore(AttentionCore):
    """Attention core for a shard of the sequence: ring attention over the keys and values of all ranks of a ring."""

    def __init__(self, config: ModelConfig, group: ProcessGroup, *, gathers: bool, causal: bool):
        super().__init__(config)
        self.rings = {}
        for dropout in (0.0, self.dropout):
            kernel = chosen_kernel(config, causal=causal, has_dropout=dropout > 0)
            partial_attention = PartialAttention(kernel.name == "flash", dropout)
            self.rings[dropout] = RingAttention(group, gathers, causal, config.pre_tokens, partial_attention)
        self.uses_segments = has_limits(config, causal)
        if config.compile:  # the set of blocks to compute depends on the documents of a batch
            self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, dropout: float) -> Tensor:
        return self.rings[dropout](query, key, value, limits if self.uses_segments else None)


class UlyssesCore(nn.Module):
    """DeepSpeed-Ulysses: all-to-all from sequence shards to head shards around another core (arXiv 2309.14509).

    ``core`` gets the sequence of the Ulysses group, with a part of the heads. The group may be one position of a ring.
    """

    def __init__(self, core: nn.Module, group: ProcessGroup):
        super().__init__()
        self.core, self.group = core, group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None = None) -> Tensor:
        if query.size(1) == key.size(1):
            heads = torch.cat([query, key, value], dim=-1)
            query, key, value = all_to_all(heads, self.group, split_dim=1, concat_dim=2).chunk(3, dim=-1)
        else:
            repeats = max(self.group.size() // key.size(1), 1)  # ranks that share a key head
            pairs = torch.cat([key, value], dim=-1).repeat_interleave(repeats, 1)
            query = all_to_all(query, self.group, split_dim=1, concat_dim=2)
            key, value = all_to_all(pairs, self.group, split_dim=1, concat_dim=2).chunk(2, dim=-1)
        context = self.core(query, key, value, limits)
        return all_to_all(context, self.group, split_dim=2, concat_dim=1)


class MaskedCore(AttentionCore):
    """Attention core of T5, with a mask [b or 1, n or 1, q, k] instead of segment ids.

    A boolean mask is True where a query attends to a key; a floating-point mask is added to the scores. With relative
    positions T5 does not scale the scores.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.scale = 1.0 if config.has_relative_positions else 1 / math.sqrt(config.head_size)
        self.in_fp32 = config.attention_softmax_in_fp32

    def attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, dropout: float) -> Tensor:
        dtype = value.dtype
        if self.in_fp32:
            query, key, value = query.float(), key.float(), value.float()
        if limits is not None and limits.is_floating_point():
            limits = limits.to(query.dtype)
        context = F.scaled_dot_product_attention(
            query, key, value, attn_mask=limits, dropout_p=dropout, scale=self.scale
        )
        return context.to(dtype)


def has_limits(config: ModelConfig, causal: bool) -> bool:
    """Whether tokens attend to their own segment only; otherwise segment ids only reset positions."""
    return config.reset_attention_mask or not (causal and config.reset_position_ids)
