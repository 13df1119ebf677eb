"""Attention in bf16 on a CPU without a mask, where that is faster than torch's fused kernel.

b batch, n query heads, g heads of keys and values, s sequence, d size of a head
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.parallel.tensor.products import ONEDNN_HAS_BF16

_SHORT = 256
"""Tokens up to which the backward pass of torch's kernel takes longer in bf16 than in fp32: by a fifth, and by half for
128 (torch 2.13, processors by Intel with and without AMX)."""
_LONG, _MULTIPLE = 1024, 64
"""Tokens up to which, and of which multiples, products are used: oneDNN compiles kernels for each length."""
_ROWS, _SCORES = 128, 1 << 20
"""Tokens, and scores, that are computed at a time, so that the scores stay in the processor's caches."""


def is_bf16_on_cpu(query: Tensor) -> bool:
    """Whether ``bf16_attention`` is for it."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16


def bf16_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """[b, n, s, d], [b, g, s, d] twice -> [b, n, s, d]."""
    length, is_compiled = query.size(2), torch.compiler.is_compiling()
    if ONEDNN_HAS_BF16 and 0 < length == key.size(2) <= _LONG and length % _MULTIPLE == 0:
        return (_operator if is_compiled else _ByProducts.apply)(query, key, value, is_causal)
    if not is_compiled and length <= _SHORT and query.requires_grad and torch.is_grad_enabled():
        return _BackwardInFp32.apply(query, key, value, is_causal)
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=query.size(1) != key.size(1)
    )


class _BackwardInFp32(torch.autograd.Function):
    """torch's kernel, with a backward pass in fp32, a sample at a time, so that little is kept in fp32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        context, logarithms = kernel(query, key, value, 0.0, is_causal)
        ctx.save_for_backward(query, key, value, context, logarithms)
        ctx.is_causal = is_causal
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        *tensors, logarithms = ctx.saved_tensors
        gradients = [torch.empty_like(tensor) for tensor in tensors[:3]]
        for sample in range(grad.size(0)):
            one = slice(sample, sample + 1)
            wide = (tensor[one].float() for tensor in (grad, *tensors))
            found = kernel(*wide, logarithms[one], 0.0, ctx.is_causal)
            for gradient, of_sample in zip(gradients, found, strict=True):
                gradient[one] = of_sample
        return *gradients, None


class _ByProducts(torch.autograd.Function):
    """Attention by products, whose weights are computed anew in the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.is_causal = is_causal
        return attend_by_products(query, key, value, is_causal)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        return *gradients_by_products(grad, query, key, value, ctx.is_causal), None


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """[b, n, s, d], [b, g, s, d] twice -> [b, n, s, d]: scores, softmax and context, of some rows at a time.

    torch's kernel multiplies by MKL, which has no bf16 on processors by AMD. Scores are rounded to bf16, as in
    Megatron's own attention; the softmax and every sum are in fp32.
    """
    context = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    for of, rows, keys in _parts(query, is_causal):
        weights = _weights(query[of, :, rows], key[of, :, keys], rows.start if is_causal else None)
        of_rows = context[of, :, rows]
        of_rows.copy_((weights @ value[of, :, keys].flatten(0, 1)).view(of_rows.shape))
    return context


def gradients_by_products(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of query, key and value, from the gradient of the context [b, n, s, d]."""
    scale, groups = query.size(-1) ** -0.5, key.size(1)
    of_query = torch.empty_like(query)
    of_key, of_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
    for of, rows, keys in _parts(query, is_causal):
        some_rows, some_keys, some_values = query[of, :, rows], key[of, :, keys], value[of, :, keys]
        weights = _weights(some_rows, some_keys, rows.start if is_causal else None)
        of_rows = _by_group(grad[of, :, rows], groups)
        of_value[of, :, keys] += (weights.transpose(1, 2) @ of_rows).view(some_values.shape)
        of_weights = of_rows @ some_values.flatten(0, 1).transpose(1, 2)
        of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_query[of, :, rows] = (of_scores @ some_keys.flatten(0, 1)).mul_(scale).view(some_rows.shape)
        of_key[of, :, keys] += (of_scores.transpose(1, 2) @ _by_group(some_rows, groups)).view(some_keys.shape)
    return of_query, of_key.mul_(scale).to(key.dtype), of_value.to(value.dtype)


def _parts(query: Tensor, is_causal: bool) -> Iterator[tuple[slice, slice, slice]]:
    """Samples, their rows, and the keys for them."""
    samples, heads, length, _ = query.shape
    rows = min(length, _ROWS)
    together = max(1, _SCORES // (heads * rows * length))
    for first in range(0, samples, together):
        for begin in range(0, length, rows):
            end = min(begin + rows, length)
            yield slice(first, first + together), slice(begin, end), slice(0, end if is_causal else length)


def _weights(query: Tensor, key: Tensor, begin: int | None) -> Tensor:
    """Of rows of query [b, n, c, d] from ``begin`` on, for key [b, g, k, d]: [b g, n/g c, k]. None: not causal."""
    groups, rows = key.size(1), query.size(2)
    if begin is None:
        mask, beta = query.new_zeros(1), 0
    else:
        mask, beta = query.new_full((rows, key.size(2)), -torch.inf).triu_(begin + 1), 1
        mask = mask.repeat(query.size(1) // groups, 1)
    keys = key.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(mask, _by_group(query, groups), keys, beta=beta, alpha=query.size(-1) ** -0.5)
    return scores.softmax(-1)


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[b, n, c, d] -> [b g, n/g c, d]: rows of all heads that share a key, one after the other."""
    return heads.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)


# ``_ByProducts`` as an operator that the compiler does not look into.


@torch.library.custom_op("megatron::attention_by_products", mutates_args=())
def _operator(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return attend_by_products(query, key, value, is_causal)


@_operator.register_fake
def _context_like(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


@torch.library.custom_op("megatron::attention_by_products_backward", mutates_args=())
def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_by_products(grad, query, key, value, is_causal)


@_gradients.register_fake
def _gradients_like(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    *heads, ctx.is_causal = inputs
    ctx.save_for_backward(*heads)


def _operator_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_gradients(grad, *ctx.saved_tensors, ctx.is_causal), None


_operator.register_autograd(_operator_backward, setup_context=_keep)
