"""Cores of attention: from the query, key and value of this rank's heads to their context.

A core is called with query [b, n, s, d], key and value [b, g, s, d], and what limits attention: segment ids [b, s], or
None. It returns the context [b, n, s, d], and knows nothing of projections. Dropout and recomputation belong to it.

b batch, n heads of queries, g heads of keys and values, s sequence, d size of a head
"""

import math

import deepspeed
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.ops.attention import Attention, chosen_kernel
from megatron.ops.partial_attention import PartialAttention
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import all_to_all
from megatron.parallel.sequence.ring_attention import RingAttention
from megatron.parallel.tensor.random import random_stream


def attention_core(config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool) -> nn.Module:
    """The core for the way in which ``layout`` shards the sequence."""
    if config.encoder_num_layers:
        return MaskedCore(config)
    core: nn.Module
    if layout.ring_group:
        core = RingCore(config, layout.ring_group, gathers=layout.ring_gathers, causal=causal)
    else:
        core = LocalCore(config, layer_number=layer_number, causal=causal)
    return UlyssesCore(core, layout.ulysses_group) if layout.ulysses_group else core


class AttentionCore(nn.Module):
    """The base of cores: dropout from the stream of this rank, and selective recomputation, around ``attend``."""

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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, dropout: float) -> Tensor:
        """Scores, softmax, dropout and context."""
        raise NotImplementedError


class LocalCore(AttentionCore):
    """Attention to the entire sequence, which this rank has."""

    def __init__(self, config: ModelConfig, *, layer_number: int, causal: bool):
        super().__init__(config)
        self.attention = Attention(config, causal=causal, layer_number=layer_number)
        self.uses_segments = has_limits(config, causal)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, dropout: float) -> Tensor:
        return self.attention(query, key, value, limits if self.uses_segments else None, dropout)


class RingCore(AttentionCore):
    """Attention of a shard of the sequence, with the keys and values of the other ranks of a ring."""

    def __init__(self, config: ModelConfig, group: ProcessGroup, *, gathers: bool, causal: bool):
        super().__init__(config)
        self.rings = {}
        for dropout in (0.0, self.dropout):
            kernel = chosen_kernel(config, causal=causal, has_dropout=dropout > 0)
            partial_attention = PartialAttention(kernel.name == "flash", dropout)
            self.rings[dropout] = RingAttention(group, gathers, causal, config.pre_tokens, partial_attention)
        self.uses_segments = has_limits(config, causal)
        if config.compile:  # which blocks there are depends on the documents of a batch
            self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None, dropout: float) -> Tensor:
        return self.rings[dropout](query, key, value, limits if self.uses_segments else None)


class UlyssesCore(nn.Module):
    """Exchanges a shard of the sequence with all heads for the sequence with a part of the heads (DeepSpeed-Ulysses).

    ``core`` gets that sequence, or the shard of it that belongs to this rank's ring (arXiv 2309.14509).
    """

    def __init__(self, core: nn.Module, group: ProcessGroup):
        super().__init__()
        self.core, self.group = core, group

    def forward(self, query: Tensor, key: Tensor, value: Tensor, limits: Tensor | None = None) -> Tensor:
        if query.size(1) == key.size(1):
            heads = torch.cat([query, key, value], dim=-1)
            query, key, value = all_to_all(heads, self.group, split_dim=1, concat_dim=2).chunk(3, dim=-1)
        else:
            repeats = max(self.group.size() // key.size(1), 1)  # of a head that several ranks share
            pairs = torch.cat([key, value], dim=-1).repeat_interleave(repeats, 1)
            query = all_to_all(query, self.group, split_dim=1, concat_dim=2)
            key, value = all_to_all(pairs, self.group, split_dim=1, concat_dim=2).chunk(2, dim=-1)
        context = self.core(query, key, value, limits)
        return all_to_all(context, self.group, split_dim=2, concat_dim=1)


class MaskedCore(AttentionCore):
    """Attention of T5, limited by a mask [b or 1, n or 1, q, k] instead of segment ids.

    The mask is True where a query attends to a key, or is added to the scores, which T5 with relative positions does
    not scale.
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
    """Whether tokens attend to their own segment only; otherwise segment ids are for positions."""
    return config.reset_attention_mask or not (causal and config.reset_position_ids)
