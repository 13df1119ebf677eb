"""T5's positions: a bias of the attention scores by the distance of two tokens (arXiv 1910.10683, section 2.1).

q queries, k keys, n heads of this rank
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.weights import weight
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import sharded_parameter

STATE = 3
"""Tensors that T5's layers pass on, besides the bias."""


class RelativePositions(nn.Module):
    """Adds the bias of each head, [1, n, s, s], to what layers pass on, three tensors of which the first is [b, s, h].

    One table is for all layers of a stack, and they pass its bias on. With ``causal`` distances are to earlier tokens
    only.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, name: str, causal: bool):
        super().__init__()
        self.causal, self.max_distance = causal, config.relative_attention_max_distance
        shape = (config.relative_attention_num_buckets, config.num_attention_heads)
        table = weight(config, f"{name}_relative_positions").draw(shape)
        self.weight = sharded_parameter(table, dim=1, group=layout.tensor_group)

    def forward(self, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(state) > STATE:
            return state
        length = state[0].size(1)
        return (*state, self.bias(length, length))

    def bias(self, queries: int, keys: int) -> Tensor:
        """[1, n, q, k] for queries that are the last ones of the keys."""
        buckets = _buckets(queries, keys, self.causal, self.weight.size(0), self.max_distance, self.weight.device)
        return F.embedding(buckets, self.weight).permute(2, 0, 1).unsqueeze(0)


def without_bias(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a stage sends on: the next stage has its own table."""
    return state[:STATE]


def with_bias_apart(
    positions: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]], state: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tensor]:
    """A state, and the bias of ``positions`` for layers that are recomputed, which is no argument of theirs.

    The backward pass of a layer ends before the backward pass of the previous one begins. Their gradients of the bias
    are added up in a separate tensor, and handed over at the end: the table gets its gradient once, as ZeRO needs it.
    """
    hidden, *others, bias = positions(state)
    collecting = bias.detach().requires_grad_(bias.requires_grad)
    if bias.requires_grad and torch.is_grad_enabled():
        hidden = _HandOver.apply(hidden, bias, collecting)
    return (hidden, *others), collecting


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, bias: Tensor, collecting: Tensor) -> Tensor:
        ctx.collecting = collecting
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.collecting.grad, None


@lru_cache(maxsize=8)
def _buckets(queries: int, keys: int, causal: bool, buckets: int, max_distance: int, device: torch.device) -> Tensor:
    """The row of the table for each query and key, int64 [q, k].

    Half of the rows are for keys after the query, unless attention is causal. Of the rows of a direction half are for
    one distance each, and the others for ranges that grow with the logarithm of the distance.
    """
    ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    distance, offset = (-ahead).clamp(min=0), torch.zeros_like(ahead)
    if not causal:
        buckets //= 2
        distance, offset = ahead.abs(), (ahead > 0) * buckets
    exact = buckets // 2
    # As in transformers' T5: in fp32, and truncated.
    growth = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    far = (exact + (growth * (buckets - exact)).clamp(min=0).long()).clamp(max=buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
