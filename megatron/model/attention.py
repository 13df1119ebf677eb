"""Self-attention with the heads sharded over the tensor group, and its key-value cache for generation.

b batch, s sequence, h hidden, n heads of this rank, g of them with keys and values of their own, d size of a head
"""

import math
from functools import partial

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.attention_kernel import AttentionKernel, attention_kernel
from megatron.model.kernels import device_facts, residual_weight, weight
from megatron.model.packed_attention import attend_in_blocks, attend_varlen, dense_mask, window_mask
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import all_to_all, sequence_parallel_dim
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.random import random_stream


class KeyValueCache:
    """Keys and values of every layer, for a batch of sequences that end in the same column and may begin later.

    ``begins`` [b] is the column in which each sequence begins; the columns before it are not attended to. For every
    step, ``advance`` reserves new columns, and each layer fills them with ``extend``. In its shapes q are the new
    columns and c the columns so far.
    """

    def __init__(
        self, config: ModelConfig, begins: Tensor, columns: int, *, heads: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (config.num_layers, 2, begins.numel(), heads, columns, config.head_size)
        self._kept = torch.empty(shape, dtype=dtype, device=device)
        self._begins = begins.to(device)
        self._pre_tokens = config.pre_tokens
        self._length = 0
        self.positions = torch.empty(0, 0, device=device)
        """Positions of the new columns in their sequences [b, q]."""
        self.visible = torch.empty(0, 0, 0, 0, device=device)
        """True where a new column attends to a column [b, 1, q, c]."""

    def advance(self, count: int) -> None:
        """Reserve ``count`` new columns."""
        rows = torch.arange(self._length, self._length + count, device=self._begins.device)
        columns = torch.arange(self._length + count, device=self._begins.device)
        self._length += count
        self.positions = (rows - self._begins.unsqueeze(1)).clamp(min=0)
        back = rows.unsqueeze(1) - columns  # [q, c]
        in_window = (back >= 0) & (back <= self._pre_tokens)
        has_begun = columns >= self._begins.unsqueeze(1)  # [b, c]
        # A column before the sequence attends to itself: without any column, the softmax would be NaN, which spreads.
        self.visible = (in_window & has_begun.unsqueeze(1) | (back == 0)).unsqueeze(1)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all columns so far, [b, n, c, d] each, the new ones [b, n, q, d] last."""
        kept, begin = self._kept[layer], self._length - key.size(2)
        kept[0, :, :, begin : self._length] = key
        kept[1, :, :, begin : self._length] = value
        return kept[0, :, :, : self._length], kept[1, :, :, : self._length]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be repeated."""
        self._kept = self._kept[:, :, rows.to(self._kept.device)]
        self._begins = self._begins[rows.to(self._begins.device)]


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
        # Rows are [heads, 3, d]: a rank's shard holds whole heads for every size of the group.
        self.query_key_value = ColumnParallelLinear(
            h, 3 * h, group=group, init=weight(config, f"{name}.query_key_value"), sequence_dim=dim
        )
        self.dense = RowParallelLinear(
            h, h, group=group, init=residual_weight(config, f"{name}.dense"), sequence_dim=dim
        )
        self.sequence_group = layout.sequence_group
        self.batch_dim = 1 - config.sequence_dim
        self.config = config
        self.causal = causal
        self.pre_tokens = config.pre_tokens
        self.recomputes = config.recomputes_attention
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.score_divisor = layer_number if config.apply_query_key_layer_scaling else None
        if config.compile:  # how documents lie differs in each batch, and the compiler would start again
            self._attend_apart = torch.compiler.disable(self._attend_apart)  # type: ignore[method-assign]

    def forward(self, hidden: Tensor, segment_ids: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        # [b, s, n, 3d] or [s, b, n, 3d] -> [b, n, s, 3d]
        heads = self.query_key_value(hidden).unflatten(-1, (self.heads, -1)).movedim((self.batch_dim, 2), (0, 1))
        if self.sequence_group:  # a sequence shard of all heads -> the whole sequence for a part of the heads
            heads = all_to_all(heads, self.sequence_group, split_dim=1, concat_dim=2)
        tensors = heads.chunk(3, dim=-1) if segment_ids is None else (*heads.chunk(3, dim=-1), segment_ids)
        if cache is not None:
            query, key, value = tensors
            key, value = cache.extend(self.layer_number - 1, key, value)
            context = self._compute(query, key, value, cache.visible, 0.0)
        elif self.recomputes and self.training:
            context = deepspeed.checkpointing.checkpoint(self._core, *tensors)
        else:
            context = self._core(*tensors)
        if self.sequence_group:
            context = all_to_all(context, self.sequence_group, split_dim=2, concat_dim=1)
        return self.dense(context.movedim((0, 1), (self.batch_dim, 2)).flatten(2))

    def _core(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        """Scores, softmax, dropout and context: [b, n, s, d], [b, g, s, d] twice -> [b, n, s, d]."""
        if not (self.training and self.dropout):
            return self._attend(query, key, value, segment_ids, 0.0)
        with random_stream(per_rank=True):  # ranks hold different heads, and need different dropout
            return self._attend(query, key, value, segment_ids, self.dropout)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, dropout: float) -> Tensor:
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
        if limits == "mask":
            mask = dense_mask(query.size(2), query.device, segment_ids, self.causal, self.pre_tokens)
            return core(query, key, value, mask)
        return attend_in_blocks(query, key, value, segment_ids, self.causal, self.pre_tokens, core)

    def _kernel(self, query: Tensor, dropout: float) -> AttentionKernel:
        return attention_kernel(
            self.config,
            device_facts(query.device),
            seq_length=query.size(2),
            causal=self.causal,
            has_dropout=dropout > 0,
            dtype=_DTYPE_NAMES.get(query.dtype, "fp32"),
        )

    def _compute(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        core = self._explicit if self.softmax_in_fp32 or self.score_divisor else self._fused
        return core(query, key, value, mask, dropout)

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        shares = query.size(1) != key.size(1)
        if shares and not self._kernel(query, dropout).shares_keys:
            (key, value), shares = _for_each_head(query, key, value), False
        is_causal = mask is None and self.causal
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=shares
        )

    def _explicit(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """Step by step, for options that the fused kernel does not have: the softmax's type and scaled scores."""
        divisor = self.score_divisor or 1
        key, value = _for_each_head(query, key, value)
        if self.softmax_in_fp32:  # an fp32 softmax of rounded scores would gain nothing
            query, key = query.float(), key.float()
        scores = (query / (math.sqrt(query.size(-1)) * divisor)) @ key.transpose(-1, -2)  # [b, n, s, s]
        if mask is None and self.causal:
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
