"""Attention with the heads sharded over the tensor group: projections, and a core between them.

b batch, s sequence, h hidden, n heads of this rank, g of them with their own keys and values, d size of a head
"""

from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention_core import MaskedCore, attention_core
from megatron.model.attention_heads import Heads
from megatron.model.projections import column_parallel, row_parallel
from megatron.model.rotary import RotaryPositions
from megatron.model.weights import head_norm_class
from megatron.parallel.layout import ParallelLayout


class ParallelSelfAttention(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h], or [s, b, h] for ``--shape-order SBH``.

    With ``segment_ids`` [b, s] a token attends to its own segment only. ``causal`` attention is limited to earlier
    tokens, at most ``pre_tokens`` back; otherwise a token attends to its entire segment. The core of T5 gets a mask
    instead of segment ids.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__()
        name, h, groups = f"layers.{layer_number}.attention", config.hidden_size, config.query_groups
        queries = config.num_attention_heads // groups
        self.heads = Heads(config, layout.tensor_group, (queries, 1, 1), groups)
        self.query_key_value = column_parallel(
            config, layout, f"{name}.query_key_value", h, self.heads.columns, has_bias=config.qkv_bias
        )
        norm = head_norm_class(config, layout) if config.qk_layernorm else nn.Identity
        self.q_layernorm = norm(config.head_size, eps=config.layernorm_epsilon)
        self.k_layernorm = norm(config.head_size, eps=config.layernorm_epsilon)
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
    """hidden of the decoder [b, r, h], output of the encoder [b, s, h] and a mask -> hidden [b, r, h]."""

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
