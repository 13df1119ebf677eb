"""Self-attention, its heads cut across the tensor group.

b batch, s sequence, h hidden, n heads of this rank, d size of a head
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.initial_weights import residual_weight, weight
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.layout import ParallelLayout
from megatron.mpu.random import get_rng_tracker


class ParallelSelfAttention(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h], causal.

    With ``documents`` [b, s], the number of each token's document, a token sees its own document only.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__()
        h, group, name = config.hidden_size, layout.tensor_group, f"layers.{layer_number}.attention"
        self.heads = config.num_attention_heads // group.size()
        self.dropout = config.attention_dropout
        # Rows are [heads, 3, d]: a rank's slice holds whole heads, whatever the size of the group.
        self.query_key_value = ColumnParallelLinear(
            h, 3 * h, group=group, init=weight(config, f"{name}.query_key_value")
        )
        self.dense = RowParallelLinear(h, h, group=group, init=residual_weight(config, f"{name}.dense"))
        self.softmax_in_fp32 = config.attention_softmax_in_fp32
        self.score_divisor = layer_number if config.apply_query_key_layer_scaling else None

    def forward(self, hidden: Tensor, documents: Tensor | None = None) -> Tensor:
        b, s, _ = hidden.shape
        heads = self.query_key_value(hidden).view(b, s, self.heads, -1).transpose(1, 2)  # [b, n, s, 3d]
        mask = None if documents is None else _document_mask(documents)
        core = self._explicit if self.softmax_in_fp32 or self.score_divisor else self._fused
        dropout = self.dropout if self.training else 0.0
        if dropout:
            with get_rng_tracker().fork():  # each rank has heads of its own, and so dropout of its own
                context = core(*heads.chunk(3, dim=-1), mask, dropout)
        else:
            context = core(*heads.chunk(3, dim=-1), mask, dropout)
        return self.dense(context.transpose(1, 2).reshape(b, s, -1))

    def _fused(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )

    def _explicit(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """Step by step, for what the fused kernel cannot be told: the softmax's type and scaled scores."""
        divisor = self.score_divisor or 1
        scores = (query / (math.sqrt(query.size(-1)) * divisor)) @ key.transpose(-1, -2)  # [b, n, s, s]
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if self.softmax_in_fp32 or self.score_divisor:
            scores = scores.float() * divisor
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(value.dtype)
        return F.dropout(weights, dropout) @ value


def _document_mask(documents: Tensor) -> Tensor:
    """documents [b, s] -> True where a row may see a column [b, 1, s, s]."""
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)
