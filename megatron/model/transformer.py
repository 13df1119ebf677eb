"""One transformer layer, sharded over the tensor group.

b batch, s sequence, h hidden
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.attention import ParallelSelfAttention
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.weights import adapter, norm_class, residual_weight, weight
from megatron.ops.activation import bias_gelu, dropout_add, mlp_activation
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_parallel_dim
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.tensor.lora import ColumnParallelAdapter, RowParallelAdapter
from megatron.parallel.tensor.random import random_stream

HiddenStates = Tensor | tuple[Tensor, Tensor]
"""What layers and stages pass on: hidden [b, s, h], or [s, b, h] for ``--shape-order SBH``, and segment ids, int32
[b, s], if attention is limited to a token's segment. With ``--fp32-residual-connection`` hidden is fp32."""


def unpack(hidden_states: HiddenStates) -> tuple[Tensor, Tensor | None]:
    """hidden, and the segment ids or None."""
    return hidden_states if isinstance(hidden_states, tuple) else (hidden_states, None)


class ParallelTransformerLayer(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h]: attention, then MLP, each after a norm and with a residual."""

    attention_class: type[nn.Module] = ParallelSelfAttention
    mlp_class: type[nn.Module] | None = None
    """What takes the place of ``ParallelMLP``."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__()
        self.layer_number = layer_number
        norm = norm_class(config, layout)
        self.is_sequence_parallel = layout.sequence_parallel
        self.residual_is_normed = config.apply_residual_connection_post_layernorm
        self.dropout = config.hidden_dropout
        self.draws_random_numbers = max(config.hidden_dropout, config.attention_dropout) > 0
        self.dropout_add = dropout_add(config)
        self.input_layernorm = norm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = self.attention_class(config, layout, layer_number=layer_number, causal=causal)
        self.post_attention_layernorm = norm(config.hidden_size, eps=config.layernorm_epsilon)
        self.mlp = (self.mlp_class or ParallelMLP)(config, layout, layer_number=layer_number)
        self._compiled: Callable[..., HiddenStates] | None = torch.compile(self._compute) if config.compile else None

    def forward(self, hidden_states: HiddenStates, cache: KeyValueCache | None = None) -> HiddenStates:
        if self._compiled is None:
            return self._compute(hidden_states, cache)
        if not (self.training and self.draws_random_numbers):
            return self._compiled(hidden_states, cache)
        # A compiled graph draws from one stream alone: that of attention. What comes from the other is an argument.
        masks = self._shared_masks(unpack(hidden_states)[0])
        with random_stream(per_rank=True):
            return self._compiled(hidden_states, cache, *masks)

    def _compute(
        self,
        hidden_states: HiddenStates,
        cache: KeyValueCache | None,
        attention_mask: Tensor | None = None,
        mlp_mask: Tensor | None = None,
    ) -> HiddenStates:
        """The layer; with masks [b, s, h], dropout of the outputs of attention and MLP keeps where they are true."""
        hidden, segment_ids = unpack(hidden_states)
        normed = self.input_layernorm(hidden)
        hidden = self._join(self.attention(normed, segment_ids, cache), hidden, normed, attention_mask)
        normed = self.post_attention_layernorm(hidden)
        hidden = self._join(self.mlp(normed), hidden, normed, mlp_mask)
        return hidden if segment_ids is None else (hidden, segment_ids)

    def _shared_masks(self, hidden: Tensor) -> list[Tensor]:
        """Masks of dropout [b, s, h] that all ranks of the tensor group share; none if each needs its own."""
        if self.is_sequence_parallel or not self.dropout:
            return []
        return [torch.empty_like(hidden, dtype=torch.bool).bernoulli_(1 - self.dropout) for _ in range(2)]

    def _join(self, output: Tensor, hidden: Tensor, normed: Tensor, mask: Tensor | None) -> Tensor:
        residual = normed.to(hidden.dtype) if self.residual_is_normed else hidden
        if not (self.training and self.dropout):
            return self.dropout_add(output, residual, 0.0)
        if mask is not None:
            return residual + output * mask * (1 / (1 - self.dropout))
        with random_stream(per_rank=self.is_sequence_parallel):
            return self.dropout_add(output, residual, self.dropout)


class ParallelMLP(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h] through ``ffn_hidden_size``, or ``size``; twice, as gate and up, if gated.

    With ``--tiled-mlp`` it is computed on some tokens at a time, in the backward pass, too, by DeepSpeed's TiledMLP.
    """

    def __init__(
        self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int = 0, name: str = "", size: int = 0
    ):
        super().__init__()
        h, inner, group = config.hidden_size, size or config.ffn_hidden_size, layout.tensor_group
        self.config = config
        name, fused = name or f"layers.{layer_number}.mlp", bias_gelu(config)
        dim = sequence_parallel_dim(config, layout)
        place: dict[str, Any] = {"group": group, "sequence_dim": dim, "init": weight(config, f"{name}.dense_h_to_4h")}
        parts = 2 if config.is_gated else 1
        lora = adapter(config, "dense_h_to_4h", ColumnParallelAdapter, h, inner, parts=parts, **place)
        self.dense_h_to_4h = ColumnParallelLinear(
            h, inner, has_bias=config.linear_bias, parts=parts, activation=fused, lora=lora, **place
        )
        self.activation = nn.Identity() if fused else mlp_activation(config)
        place |= {"init": residual_weight(config, f"{name}.dense_4h_to_h")}
        lora = adapter(config, "dense_4h_to_h", RowParallelAdapter, inner, h, **place)
        self.dense_4h_to_h = RowParallelLinear(inner, h, has_bias=config.linear_bias, lora=lora, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.config.tiled_mlp:
            return self._compute(hidden)
        tokens = hidden.flatten(0, 1)  # two dimensions, of which DeepSpeed divides the same one in both passes
        tiles = self.config.mlp_tiles(len(tokens))
        if torch.is_grad_enabled() and not tokens.requires_grad:  # or adapters would get no gradient, either
            tokens = tokens.detach().requires_grad_()
        return TiledMLP.apply(ParallelMLP._tile, self, tokens, tiles, [*self.parameters()]).view_as(hidden)

    def _compute(self, hidden: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden)))

    def _tile(self, tokens: Tensor) -> Tensor:
        """[tokens, h] -> [tokens, h], as a sequence; with sequence parallelism a part of one."""
        batch_dim = 1 - self.config.sequence_dim
        return self._compute(tokens.unsqueeze(batch_dim)).squeeze(batch_dim)
