"""Transformer layers as functions, for generation: a step is so short that calls of modules take a tenth of it.

b batch, q new tokens, h hidden, n heads, d size of a head
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.model.attention import ParallelSelfAttention
from megatron.model.key_value_cache import KeyValueCache
from megatron.model.transformer import ParallelMLP, ParallelTransformerLayer

CachedLayer = Callable[[Tensor, KeyValueCache], Tensor]
"""Hidden states [b, q, h] of new tokens, and the keys and values of earlier ones -> hidden [b, q, h]."""


def cached_layer(layer: ParallelTransformerLayer) -> CachedLayer:
    """What ``layer`` computes in evaluation, without calls of modules; the module itself if it computes anything else.

    As in ``ParallelTransformerLayer._compute``, ``ParallelMLP._compute`` and the attention's ``forward``.
    """
    attention = layer.attention
    own = _defines(layer, ParallelTransformerLayer, "forward", "_compute", "_join")
    if own or layer.residual_is_normed or not isinstance(attention, ParallelSelfAttention):
        return layer
    if _defines(attention, ParallelSelfAttention, "forward"):
        return layer
    input_norm, output_norm = _without_call(layer.input_layernorm), _without_call(layer.post_attention_layernorm)
    project, attend, dense = (
        _without_call(attention.query_key_value),
        attention.attend_cached,
        _without_call(attention.dense),
    )
    mlp = _mlp(layer.mlp)

    def compute(hidden: Tensor, cache: KeyValueCache) -> Tensor:
        hidden = hidden + dense(attend(project(input_norm(hidden)), cache))
        return hidden + mlp(output_norm(hidden))

    return compute


def _defines(module: nn.Module, base: type[nn.Module], *methods: str) -> bool:
    """Whether the class of ``module`` has one of these methods of its own, instead of that of ``base``."""
    return any(getattr(type(module), name) is not getattr(base, name) for name in methods)


def _mlp(mlp: nn.Module) -> Callable[[Tensor], Tensor]:
    if type(mlp) is not ParallelMLP or mlp.config.tiled_mlp:
        return mlp.forward
    up, activation, down = (
        _without_call(mlp.dense_h_to_4h),
        _without_call(mlp.activation),
        _without_call(mlp.dense_4h_to_h),
    )
    return lambda normed: down(activation(up(normed)))


def _without_call(part: Any) -> Callable[[Tensor], Tensor]:
    """A module's forward pass, without its hooks; of torch's norm the operator itself."""
    if type(part) is nn.LayerNorm:
        shape, eps = part.normalized_shape, part.eps
        weight, bias = part.weight.detach(), part.bias.detach()
        return lambda hidden: torch.layer_norm(hidden, shape, weight, bias, eps)
    return part.forward if isinstance(part, nn.Module) else part
