"""Self-attention with the heads sharded over the tensor group.

b batch, s sequence, h hidden, n heads of this rank, g of them with keys and values of their own, d size of a head
"""

import math
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.attention_kernel import AttentionKernel, attention_kernel
from megatron.model.bf16_attention import bf16_attention, is_bf16_on_cpu
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.packed_attention import attend_in_blocks, attend_varlen, dense_mask, window_mask
from megatron.model.partial_attention import PartialAttention
from megatron.model.ring_attention import RingAttention, tables_of_ring
from megatron.model.rotary import RotaryEmbedding, positions_in_segment, rotate
from megatron.model.weights import adapter, head_norm_class, residual_weight, weight
from megatron.ops.cuda import device_facts
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import all_to_all, sequence_parallel_dim
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.lora import ColumnParallelAdapter, RowParallelAdapter
from megatron.parallel.tensor.mappings import gather_from_sequence_parallel_region
from megatron.parallel.tensor.random import random_stream


class ParallelSelfAttention(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h], or [s, b, h] for ``--shape-order SBH``.

    With ``segment_ids`` [b, s] a token attends to its own segment only. ``causal`` attention is limited to earlier
    tokens, at most ``pre_tokens`` back; otherwise a token attends to its whole segment. With ``cache`` the hidden
    states are of new tokens, which also attend to the tokens in the cache.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__()
        h, group, name = config.hidden_size, layout.tensor_group, f"layers.{layer_number}.attention"
        self.layer_number = layer_number
        self.heads = config.num_attention_heads // group.size()
        self.dropout = config.attention_dropout
        dim = sequence_parallel_dim(config, layout)
        d, queries = config.head_size, config.num_attention_heads // config.query_groups
        # Rows are [groups, queries of a group, its key and its value, d]: a rank's shard holds whole groups, unless
        # there are more ranks than groups.
        columns = config.query_groups * (queries + 2) * d
        place: dict[str, Any] = {"group": group, "sequence_dim": dim, "init": weight(config, f"{name}.query_key_value")}
        lora = adapter(config, "query_key_value", ColumnParallelAdapter, h, columns, **place)
        self.query_key_value = ColumnParallelLinear(h, columns, has_bias=config.qkv_bias, lora=lora, **place)
        self.group_sizes, self.heads_per_group = (queries, 1, 1), queries + 2
        self.ranks_per_group = max(group.size() // config.query_groups, 1)
        self.tensor_group = group
        self.head_size = d
        norm = head_norm_class(config, layout) if config.qk_layernorm else nn.Identity
        self.q_layernorm = norm(d, eps=config.layernorm_epsilon)
        self.k_layernorm = norm(d, eps=config.layernorm_epsilon)
        self.rotary = RotaryEmbedding.of(config)
        # Of query, key and value. One that is a view would keep the columns of all three for the backward pass. Queries
        # that share a key are copied in any case, and what is only rotated is not kept.
        shares, is_kept = queries > 1, config.qk_layernorm or self.rotary is None
        self.copied = (self.ranks_per_group > 1 and is_kept, shares and is_kept, shares or not is_kept)
        self.resets_positions = config.reset_position_ids
        self.keeps_documents_apart = config.reset_attention_mask or not (causal and config.reset_position_ids)
        rows = config.num_attention_heads * d
        place |= {"init": residual_weight(config, f"{name}.dense")}
        lora = adapter(config, "dense", RowParallelAdapter, rows, h, **place)
        self.dense = RowParallelLinear(rows, h, has_bias=config.linear_bias, lora=lora, **place)
        self.ulysses_group = layout.ulysses_group
        self.ring_group, self.ring_gathers = layout.ring_group, layout.ring_gathers
        self.ring_size = layout.ring_group.size() if layout.ring_group else 1
        self.batch_dim = 1 - config.sequence_dim
        self.config = config
        self.causal = causal
        self.pre_tokens = config.pre_tokens
        self.recomputes = config.recomputes_attention
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.score_divisor = layer_number if config.apply_query_key_layer_scaling else None
        if config.compile:  # how documents lie differs in each batch, and the compiler would start again
            self._attend_apart = torch.compiler.disable(self._attend_apart)  # type: ignore[method-assign]
            self._attend_in_ring = torch.compiler.disable(self._attend_in_ring)  # type: ignore[method-assign]

    def forward(self, hidden: Tensor, segment_ids: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        columns = self.query_key_value(hidden)
        if cache is not None:
            return self.dense(self.attend_cached(columns, cache))
        query, key, value = self._heads(columns)
        if self.ulysses_group:
            query, key, value = _whole_sequence(query, key, value, self.ulysses_group)
        if self.rotary is not None:
            tables = self._rotation(self.rotary, query, segment_ids)
            query, key = rotate(query, tables), rotate(key, tables)
        documents = (segment_ids,) if segment_ids is not None and self.keeps_documents_apart else ()
        tensors = (query, key, value, *documents)
        if self.recomputes and self.training:
            context = deepspeed.checkpointing.checkpoint(self._core, *tensors)
        else:
            context = self._core(*tensors)
        if self.ulysses_group:
            context = all_to_all(context, self.ulysses_group, split_dim=2, concat_dim=1)
        return self.dense(self._side_by_side(context))

    def attend_cached(self, columns: Tensor, cache: KeyValueCache) -> Tensor:
        """Outputs of ``query_key_value`` for new tokens -> inputs of ``dense``; attends to the cached tokens, too."""
        query, key, value = self._heads(columns)
        if self.rotary is not None:
            cache.rotation = cache.rotation or self.rotary.tables(cache.positions, query.dtype)
            query, key = rotate(query, cache.rotation), rotate(key, cache.rotation)
        key, value = cache.extend(self.layer_number - 1, key, value)
        return self._side_by_side(self._compute(query, key, value, cache.mask, 0.0, cache.is_causal))

    def _heads(self, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """columns [b, s, (n + 2g) d] -> query [b, n, s, d], key and value [b, g, s, d] of this rank's heads."""
        if self.ranks_per_group > 1:  # each rank has a part of a group's rows, and needs its key and value, too
            columns = gather_from_sequence_parallel_region(columns, self.tensor_group, -1)
        groups = columns.view(*columns.shape[:-1], -1, self.heads_per_group, self.head_size)
        if self.ranks_per_group > 1:
            groups = groups.narrow(2, self.tensor_group.rank() // self.ranks_per_group, 1)
        if self.heads_per_group == 3:
            query, key, value = groups.unbind(3)
        else:
            query, key, value = (part.flatten(2, 3) for part in groups.split(self.group_sizes, dim=3))
        if self.ranks_per_group > 1:
            query = query.chunk(self.ranks_per_group, 2)[self.tensor_group.rank() % self.ranks_per_group]
        if any(self.copied):
            query, key, value = (
                part.contiguous() if is_copied else part
                for part, is_copied in zip((query, key, value), self.copied, strict=True)
            )
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.batch_dim:  # [s, b, n, d]
            query, key, value = (heads.transpose(0, 1) for heads in (query, key, value))
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _side_by_side(self, context: Tensor) -> Tensor:
        """context [b, n, s, d] -> [b, s, n d]"""
        return context.permute((2, 0, 1, 3) if self.batch_dim else (0, 2, 1, 3)).flatten(2)

    def _rotation(self, rotary: RotaryEmbedding, query: Tensor, segment_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the tokens' positions."""
        if self.resets_positions and segment_ids is not None:
            tables = rotary.tables(positions_in_segment(segment_ids), query.dtype)
        else:
            tables = rotary.first_positions(query.size(2) * self.ring_size, query.dtype, query.device)
        return tables_of_ring(tables, self.ring_group) if self.ring_group else tables

    def _core(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Scores, softmax, dropout and context: [b, n, s, d], [b, g, s, d] twice -> [b, n, s, d]."""
        if not (self.training and self.dropout):
            return self._attend(query, key, value, segment_ids, 0.0)
        with random_stream(per_rank=True):  # ranks hold different heads, and need different dropout
            return self._attend(query, key, value, segment_ids, self.dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, dropout: float) -> Tensor:
        if self.ring_group:
            return self._attend_in_ring(query, key, value, segment_ids, dropout)
        if segment_ids is None and self.causal and self.pre_tokens >= query.size(2) - 1:
            return self._compute(query, key, value, None, dropout)
        return self._attend_apart(query, key, value, segment_ids, dropout)

    def _attend_apart(
        self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, dropout: float
    ) -> Tensor:
        """Within documents, samples or windows, by the method that ``attention_kernel`` names."""
        assert self.causal or segment_ids is not None, (
            "without segment_ids there is nothing to keep apart from the padding"
        )
        limits, core = self._kernel(query, dropout).limits, partial(self._compute, dropout=dropout)
        if limits == "varlen":
            return attend_varlen(query, key, value, segment_ids, self.causal, self.pre_tokens)
        if limits == "flex":
            from megatron.model.flex_attention import attend_flex  # which imports torch's compiler

            return attend_flex(query, key, value, segment_ids, self.causal, self.pre_tokens)
        if limits == "mask":
            mask = dense_mask(query.size(2), query.device, segment_ids, self.causal, self.pre_tokens)
            return core(query, key, value, mask)
        return attend_in_blocks(query, key, value, segment_ids, self.causal, self.pre_tokens, core)

    def _attend_in_ring(
        self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, dropout: float
    ) -> Tensor:
        """With the keys and values of the other ranks, a part of them at a time."""
        assert self.ring_group is not None
        is_fused = self._kernel(query, dropout).name == "flash"
        kernel = PartialAttention(is_fused, dropout)
        ring = RingAttention(self.ring_group, self.ring_gathers, self.causal, self.pre_tokens, kernel)
        return ring(query, key, value, segment_ids)

    def _kernel(self, query: Tensor, dropout: float) -> AttentionKernel:
        return attention_kernel(
            self.config,
            device_facts(query.device),
            seq_length=query.size(2),
            causal=self.causal,
            has_dropout=dropout > 0,
            dtype=_DTYPE_NAMES.get(query.dtype, "fp32"),
        )

    def _compute(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Without a mask, attention is causal or to every column, as the layer is or ``is_causal`` says."""
        core = self._explicit if self.softmax_in_fp32 or self.score_divisor else self._fused
        return core(query, key, value, mask, dropout, is_causal)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool | None = None,
    ) -> Tensor:
        shares = query.size(1) != key.size(1)
        if shares and not self._kernel(query, dropout).shares_keys:
            (key, value), shares = _for_each_head(query, key, value), False
        is_causal = mask is None and (self.causal if is_causal is None else is_causal)
        if mask is None and not dropout and is_bf16_on_cpu(query):
            return bf16_attention(query, key, value, is_causal)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=shares
        )

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Step by step, for options that the fused kernel does not have: the softmax's type and scaled scores."""
        divisor = self.score_divisor or 1
        key, value = _for_each_head(query, key, value)
        if self.softmax_in_fp32:  # an fp32 softmax of rounded scores would gain nothing
            query, key = query.float(), key.float()
        scores = (query / (math.sqrt(query.size(-1)) * divisor)) @ key.transpose(-1, -2)  # [b, n, s, s]
        if mask is None and (self.causal if is_causal is None else is_causal):
            mask = window_mask(scores.size(-1), self.pre_tokens, scores.device)
        scores = scores.float() * divisor
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        return F.dropout(scores.softmax(-1).to(value.dtype), dropout) @ value


_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _for_each_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """key and value [b, g, k, d] -> [b, n, k, d]: each of their heads repeated for the queries that share it."""
    repeats = query.size(1) // key.size(1)
    return (key, value) if repeats == 1 else (key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1))


def _whole_sequence(query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """A sequence shard of all heads -> the whole sequence for a part of the heads (DeepSpeed-Ulysses)."""
    if query.size(1) == key.size(1):
        heads = torch.cat([query, key, value], dim=-1)
        query, key, value = all_to_all(heads, group, split_dim=1, concat_dim=2).chunk(3, dim=-1)
        return query, key, value
    repeats = max(group.size() // key.size(1), 1)  # of a group that several ranks share
    keys = torch.cat([key, value], dim=-1).repeat_interleave(repeats, 1)
    query = all_to_all(query, group, split_dim=1, concat_dim=2)
    key, value = all_to_all(keys, group, split_dim=1, concat_dim=2).chunk(2, dim=-1)
    return query, key, value
