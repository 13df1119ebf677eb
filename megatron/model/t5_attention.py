"""Attention of T5 with masks: of a token to its own sequence, and to the output of the encoder.

b batch, s sequence of the encoder, r of the decoder, h hidden, n heads of this rank, d size of a head
"""

import math
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.weights import residual_weight, weight
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.random import random_stream

Pair = tuple[Tensor, ...]
"""Keys and values."""


class _Attention(nn.Module):
    """Attention of this rank's heads with a mask, and the projection of its context.

    A mask [b or 1, n or 1, q, k] is True where a query attends to a key, or is added to the scores, which T5 with
    relative positions does not scale.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, name: str):
        super().__init__()
        self.head_size, self.dropout = config.head_size, config.attention_dropout
        self.scale = 1.0 if config.has_relative_positions else 1 / math.sqrt(config.head_size)
        self.recomputes, self.in_fp32 = config.recomputes_attention, config.attention_softmax_in_fp32
        self.place: dict[str, Any] = {"group": layout.tensor_group, "has_bias": config.linear_bias}
        self.columns = config.num_attention_heads * config.head_size
        self.config, self.name = config, name

    def _column(self, parts: str, count: int) -> ColumnParallelLinear:
        """The projection to ``count`` vectors of each head, rows [heads, count, d]."""
        init = weight(self.config, f"{self.name}.{parts}")
        return ColumnParallelLinear(self.config.hidden_size, count * self.columns, init=init, **self.place)

    def _row(self) -> RowParallelLinear:
        init = residual_weight(self.config, f"{self.name}.dense")
        return RowParallelLinear(self.columns, self.config.hidden_size, init=init, **self.place)

    def heads(self, columns: Tensor, parts: int) -> tuple[Tensor, ...]:
        """[b, s, n x parts x d] -> ``parts`` of [b, n, s, d]."""
        return columns.unflatten(-1, (-1, parts, self.head_size)).transpose(1, 2).unbind(3)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """[b, n, q, d], [b, n, k, d] twice -> [b, q, n x d]."""
        tensors = (query, key, value, mask)
        if self.recomputes and self.training:
            context = deepspeed.checkpointing.checkpoint(self._core, *tensors)
        else:
            context = self._core(*tensors)
        return context.transpose(1, 2).flatten(2)

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return self._product(query, key, value, mask, 0.0)
        with random_stream(per_rank=True):  # ranks hold different heads, and need different dropout
            return self._product(query, key, value, mask, self.dropout)

    def _product(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
        kind = value.dtype
        if self.in_fp32:
            query, key, value = query.float(), key.float(), value.float()
        if mask.is_floating_point():
            mask = mask.to(query.dtype)
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=self.scale)
        return context.to(kind)


class MaskedSelfAttention(_Attention):
    """hidden [b, q, h] and a mask -> hidden [b, q, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__(config, layout, f"layers.{layer_number}.attention")
        self.layer_number = layer_number
        self.query_key_value, self.dense = self._column("query_key_value", 3), self._row()

    def forward(self, hidden: Tensor, mask: Tensor, cache: "DecoderCache | None" = None) -> Tensor:
        query, key, value = self.heads(self.query_key_value(hidden), 3)
        if cache is not None:
            key, value = cache.extend(self.layer_number, key, value)
        return self.dense(self.attend(query, key, value, mask))


class CrossAttention(_Attention):
    """hidden of the decoder [b, r, h], output of the encoder [b, s, h] and a mask -> hidden [b, r, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__(config, layout, f"layers.{layer_number}.inter_attention")
        self.query, self.key_value = self._column("query", 1), self._column("key_value", 2)
        self.dense, self.layer_number = self._row(), layer_number

    def forward(
        self, hidden: Tensor, encoder_output: Tensor, mask: Tensor, cache: "DecoderCache | None" = None
    ) -> Tensor:
        (query,) = self.heads(self.query(hidden), 1)
        pair = cache.of_encoder.get(self.layer_number) if cache is not None else None
        if pair is None:
            pair = self.heads(self.key_value(encoder_output), 2)
        if cache is not None:
            cache.of_encoder[self.layer_number] = pair
        key, value = pair
        return self.dense(self.attend(query, key, value, mask))


class DecoderCache:
    """Keys and values in generation, [b, n, .., d] by the number of a layer: of the tokens so far, and of the text."""

    def __init__(self) -> None:
        self.of_tokens: dict[int, Pair] = {}
        self.of_encoder: dict[int, Pair] = {}

    def extend(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Those of all tokens so far, the new ones last."""
        if layer in self.of_tokens:
            pairs = zip(self.of_tokens[layer], (key, value), strict=True)
            key, value = (torch.cat(pair, dim=2) for pair in pairs)
        self.of_tokens[layer] = key, value
        return key, value

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may be repeated."""
        for pairs in (self.of_tokens, self.of_encoder):
            pairs.update({layer: tuple(tensor[rows] for tensor in pair) for layer, pair in pairs.items()})
