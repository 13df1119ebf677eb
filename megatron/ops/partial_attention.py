"""Attention of queries to a part of their keys, with what is needed to merge it with attention to the other parts.

The logarithm of the sum of a query's exponentials says how much of its attention falls on a part. Given that of all
parts, the gradient of each can be computed by itself (arXiv 2205.14135, 2310.01889).

b batch, n heads of queries, g heads of keys and values, q queries, k keys, d size of a head
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 512
"""Queries whose scores are computed at a time, step by step."""
_LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class PartialAttention:
    """A kernel: torch's flash attention, or scores and softmax step by step in fp32, which has dropout."""

    fused: bool
    dropout: float = 0.0

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """[b, n, q, d], [b, g, k, d] twice -> context [b, n, q, d], and its logarithms, fp32 [b, n, q].

        A query attends to the keys for which ``mask`` [q, k] is True; without it to all of them or, if ``is_causal``,
        to those up to its own number. Of none, the context is 0 and the logarithm -inf. A mask of numbers is added to
        the scores, and leaves each query a key.
        """
        key, value = _for_each_head(query, key), _for_each_head(query, value)
        if self._has_fused(query, mask):
            return _fused(query, key, value, mask, is_causal)
        contexts, logarithms = [], []
        for _, scores, kept in self._scores(query, key, mask, is_causal, seed):
            logarithms.append(scores.logsumexp(-1))
            weights = _weights(scores, logarithms[-1])
            contexts.append((weights if kept is None else weights * kept) @ value.float())
        return torch.cat(contexts, 2).to(query.dtype), torch.cat(logarithms, 2)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Tensor,
        logarithms: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        seed: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value; ``context`` and ``logarithms`` are those of all parts together."""
        groups = key.size(1)
        key, value = _for_each_head(query, key), _for_each_head(query, value)
        if self._has_fused(query, mask):
            of_query, of_key, of_value = _fused_backward(grad, query, key, value, context, logarithms, mask, is_causal)
            return of_query, _sum_of_heads(of_key, groups), _sum_of_heads(of_value, groups)
        wide_key, wide_value = key.float(), value.float()
        of_queries, scale = [], 1 / math.sqrt(query.size(-1))
        of_key, of_value = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
        for rows, scores, kept in self._scores(query, key, mask, is_causal, seed):
            weights, wide = _weights(scores, logarithms[:, :, rows]), grad[:, :, rows].float()
            of_weights = wide @ wide_value.transpose(-1, -2)
            of_value += (weights if kept is None else weights * kept).transpose(-1, -2) @ wide
            if kept is not None:
                of_weights *= kept
            share = (wide * context[:, :, rows]).sum(-1, keepdim=True)
            of_scores = weights * (of_weights - share) * scale
            of_queries.append(of_scores @ wide_key)
            of_key += of_scores.transpose(-1, -2) @ query[:, :, rows].float()
        return torch.cat(of_queries, 2), _sum_of_heads(of_key, groups), _sum_of_heads(of_value, groups)

    def _has_fused(self, query: Tensor, mask: Tensor | None) -> bool:
        on_cpu = query.device.type == "cpu"
        return self.fused and not self.dropout and (on_cpu or (mask is None and query.size(-1) % 8 == 0))

    def _scores(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, seed: int
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """(rows, their scores [b, n, rows, k], what dropout multiplies them by) of some queries at a time."""
        scale, wide_key = 1 / math.sqrt(query.size(-1)), key.float().transpose(-1, -2)
        generator = torch.Generator(query.device).manual_seed(seed) if self.dropout else None
        for begin in range(0, query.size(2), ROWS):
            rows = slice(begin, min(begin + ROWS, query.size(2)))
            scores = (query[:, :, rows].float() * scale) @ wide_key
            if is_causal:
                later = torch.ones(scores.shape[2:], dtype=torch.bool, device=query.device).triu(begin + 1)
                scores.masked_fill_(later, -torch.inf)
            elif mask is not None:
                scores += _added(mask[rows], scores)
            kept = None
            if generator is not None:
                kept = torch.empty_like(scores).bernoulli_(1 - self.dropout, generator=generator) / (1 - self.dropout)
            yield rows, scores, kept


def merge(context: Tensor, logarithms: Tensor, part: Tensor, of_part: Tensor) -> None:
    """Add a part, [b, n, q, d] and [b, n, q], to a context and its logarithms, in place; both are fp32."""
    total = torch.logaddexp(logarithms, of_part)
    finite = total.clamp(min=_LEAST)  # of none so far: exp(-inf) is 0, and would be NaN less -inf
    context.mul_((logarithms - finite).exp().unsqueeze(-1))
    context.add_(part * (of_part - finite).exp().unsqueeze(-1))
    logarithms.copy_(total)


def _weights(scores: Tensor, logarithms: Tensor) -> Tensor:
    """The softmax whose sums of exponentials have these logarithms; 0 where nothing is seen."""
    return (scores - logarithms.clamp(min=_LEAST).unsqueeze(-1)).exp()


def _fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    if query.device.type != "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)
        return found[0], found[1]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    context, logarithms = kernel(
        query, key, value, 0.0, is_causal, attn_mask=None if mask is None else _added(mask, query)
    )
    if mask is None or mask.dtype != torch.bool:
        return context, logarithms
    blind = ~mask.any(-1)
    return context.masked_fill(blind.unsqueeze(-1), 0.0), logarithms.masked_fill(blind, -torch.inf)


def _fused_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    logarithms: Tensor,
    mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (grad, query, key, value, context, logarithms.contiguous())
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*tensors, 0.0, is_causal, attn_mask=None if mask is None else _added(mask, query))
    random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
    lengths = (None, None, query.size(2), key.size(2))
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *tensors, *lengths, 0.0, is_causal, random_state, random_state
    )


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """``mask`` as what is added to scores: 0 or -inf."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(~mask, -torch.inf)


def _for_each_head(query: Tensor, key: Tensor) -> Tensor:
    """[b, g, k, d] -> [b, n, k, d]: each head repeated for the queries that share it."""
    repeats = query.size(1) // key.size(1)
    return key if repeats == 1 else key.repeat_interleave(repeats, 1)


def _sum_of_heads(gradient: Tensor, groups: int) -> Tensor:
    """The gradient [b, n, k, d] of heads that were repeated -> [b, g, k, d]."""
    return gradient if gradient.size(1) == groups else gradient.unflatten(1, (groups, -1)).sum(2)
