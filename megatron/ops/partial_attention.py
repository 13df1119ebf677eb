"""Attention of queries to a part of their keys, whose results can be merged (online softmax).

The logsumexp of a query's scores weighs the parts. Given the logsumexp over all parts, the gradient of each part can be
computed separately (arXiv 2205.14135, 2310.01889).

b batch, n query heads, g key and value heads, q queries, k keys, d size of a head
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.ops.attention import repeated_for_queries

ROWS = 512
"""Queries whose scores are computed at a time in the unfused kernel."""
_LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class PartialAttention:
    """Kernel for partial attention: torch's flash attention, or unfused in fp32, which supports dropout."""

    fused: bool
    dropout: float = 0.0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """query [b, n, q, d], key and value [b, g, k, d] -> context [b, n, q, d], logsumexp of scores, fp32 [b, n, q].

        A query attends to the keys where a boolean ``mask`` [q, k] is True; without a mask to all keys, or to those up
        to its own index if ``is_causal``. Without any key, its context is 0 and its logsumexp -inf. A floating-point
        mask is added to the scores, and must leave each query a key.
        """
        key, value = repeated_for_queries(query, key, value)
        if self._has_fused(query, mask):
            return _fused(query, key, value, mask, is_causal)
        contexts, sums = [], []
        for _, scores, kept in self._scores(query, key, mask, is_causal, seed):
            sums.append(scores.logsumexp(-1))
            weights = _weights(scores, sums[-1])
            contexts.append((weights if kept is None else weights * kept) @ value.float())
        return torch.cat(contexts, 2).to(query.dtype), torch.cat(sums, 2)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Tensor,
        logsumexp: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; ``context`` and ``logsumexp`` are merged over all parts."""
        groups = key.size(1)
        key, value = repeated_for_queries(query, key, value)
        if self._has_fused(query, mask):
            tensors = grad, query, key, value, context, logsumexp.contiguous()
            query_grad, key_grad, value_grad = _fused_backward(tensors, mask, is_causal)
            return query_grad, _sum_of_heads(key_grad, groups), _sum_of_heads(value_grad, groups)
        wide_key, wide_value = key.float(), value.float()
        query_grads, scale = [], 1 / math.sqrt(query.size(-1))
        key_grad, value_grad = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
        for rows, scores, kept in self._scores(query, key, mask, is_causal, seed):
            weights, wide = _weights(scores, logsumexp[:, :, rows]), grad[:, :, rows].float()
            weight_grads = wide @ wide_value.transpose(-1, -2)
            value_grad += (weights if kept is None else weights * kept).transpose(-1, -2) @ wide
            if kept is not None:
                weight_grads *= kept
            share = (wide * context[:, :, rows]).sum(-1, keepdim=True)
            score_grads = weights * (weight_grads - share) * scale
            query_grads.append(score_grads @ wide_key)
            key_grad += score_grads.transpose(-1, -2) @ query[:, :, rows].float()
        return torch.cat(query_grads, 2), _sum_of_heads(key_grad, groups), _sum_of_heads(value_grad, groups)

    def _has_fused(self, query: Tensor, mask: Tensor | None) -> bool:
        on_cpu = query.device.type == "cpu"
        return self.fused and not self.dropout and (on_cpu or (mask is None and query.size(-1) % 8 == 0))

    def _scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, seed: int
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """(rows, their scores [b, n, rows, k], scaled dropout mask or None) for chunks of queries."""
        scale, wide_key = 1 / math.sqrt(query.size(-1)), key.float().transpose(-1, -2)
        generator = torch.Generator(query.device).manual_seed(seed) if self.dropout else None
        for begin in range(0, query.size(2), ROWS):
            rows = slice(begin, min(begin + ROWS, query.size(2)))
            scores = (query[:, :, rows].float() * scale) @ wide_key
            if is_causal:
                later = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).triu(begin + 1)
                scores.masked_fill_(later, -torch.inf)
            elif mask is not None:
                scores += _additive(mask[rows], scores)
            kept = None
            if generator is not None:
                kept = torch.empty_like(scores).bernoulli_(1 - self.dropout, generator=generator) / (1 - self.dropout)
            yield rows, scores, kept


def merge(context: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Merge a part, [b, n, q, d] and [b, n, q], into ``context`` and ``logsumexp`` (both fp32) in place."""
    total = torch.logaddexp(logsumexp, part_logsumexp)
    finite = total.clamp(min=_LEAST)  # without any key yet total is -inf, and -inf - (-inf) would be NaN
    context.mul_((logsumexp - finite).exp().unsqueeze(-1))
    context.add_(part * (part_logsumexp - finite).exp().unsqueeze(-1))
    logsumexp.copy_(total)


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Attention weights exp(scores - logsumexp); 0 if a query attends to no key."""
    return (scores - logsumexp.clamp(min=_LEAST).unsqueeze(-1)).exp()


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    if query.device.type != "cpu":
        output = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
        return output[0], output[1]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    context, logsumexp = kernel(
        query, key, value, 0.0, is_causal, attn_mask=None if mask is None else _additive(mask, query)
    )
    if mask is None or mask.dtype != torch.bool:
        return context, logsumexp
    blind = ~mask.any(-1)
    return context.masked_fill(blind.unsqueeze(-1), 0.0), logsumexp.masked_fill(blind, -torch.inf)


def _fused_backward(tensors: tuple[Tensor, ...], mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``tensors`` are gradient, query, key, value, context and logsumexp."""
    _, query, key, *_ = tensors
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*tensors, 0.0, is_causal, attn_mask=None if mask is None else _additive(mask, query))
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # unused without dropout
    lengths = (None, None, query.size(2), key.size(2))
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *tensors, *lengths, 0.0, is_causal, random_state, random_state
    )


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """``mask`` as an additive mask of 0 and -inf."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -torch.inf)


def _sum_of_heads(gradient: Tensor, groups: int) -> Tensor:
    """Sum the gradients of repeated heads: [b, n, k, d] -> [b, g, k, d]."""
    return gradient if gradient.size(1) == groups else gradient.unflatten(1, (groups, -1)).sum(2)
