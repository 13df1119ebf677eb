"""The linear operation of tensor-parallel layers, which overlaps communication with its matmuls.

t ranks of the group, i inputs, o outputs, r rows: all tokens of a rank, b x s
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.ops.fp8 import kernel_of
from megatron.ops.linear import LinearKernel
from megatron.parallel import process_groups
from megatron.parallel.tensor.chunks import BY_RANK, gather_and_multiply, multiply_and_reduce, multiply_and_scatter
from megatron.parallel.tensor.deferred import DeferredWeightGradients
from megatron.parallel.tensor.mappings import (
    all_gather,
    async_all_gather,
    async_all_reduce,
    async_reduce_scatter,
    largest_of_ranks,
)

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, weight and bias."""

PLAIN = LinearKernel()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: ProcessGroup | None = None,
    sequence_dim: int | None = None,
    *,
    kernel: LinearKernel = PLAIN,
    deferred: DeferredWeightGradients | None = None,
    sums_outputs: bool = False,
    chunks: int = 1,
) -> Tensor:
    """Linear operation with communication: x [.., i], weight [o, i], bias [o] -> [.., o].

    Column-parallel by default: the gradient of x is all-reduced over ``group``. With ``sequence_dim``, x is a shard
    along it, such as [b, s/t, i] for 1: it is all-gathered, the output is [b, s, o], and the gradient of x is
    reduce-scattered. Row-parallel with ``sums_outputs``: the output is all-reduced, or with ``sequence_dim`` reduce-
    scattered, and its gradient all-gathered. The forward pass overlaps communication in ``chunks``; ``BY_RANK`` needs
    ``sequence_dim`` and the plain torch kernel. ``deferred`` may collect the weight gradient instead of computing it.
    """
    if group is None or group.size() == 1:
        group = sequence_dim = None
    if torch.compiler.is_compiling():
        if group is None:
            return kernel.traced(x, weight, bias)
        return _linear_operator(x, weight, bias, group.group_name, sequence_dim, sums_outputs, chunks, kernel.recipe)
    if group is None and deferred is None and not kernel.has_own_gradients:
        return kernel.forward(x, weight, bias)
    kind = _OVERLAPS[sums_outputs and group is not None]
    return _Linear.apply(x, weight, bias, kind(group, sequence_dim, kernel, deferred, chunks))


@dataclass(eq=False)
class _Overlap:
    """Forward and backward pass of a column-parallel linear layer, with overlapped communication.

    The input is all-gathered (with ``sequence_dim``), and its gradient is summed.
    """

    group: ProcessGroup | None
    sequence_dim: int | None
    kernel: LinearKernel = PLAIN
    deferred: DeferredWeightGradients | None = None
    chunks: int = 1

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.group is None or self.sequence_dim is None:
            return self.kernel.forward(x, weight, bias)
        if self.chunks == BY_RANK:
            return process_groups.gather_and_multiply(x, weight, bias, self.group, self.sequence_dim)
        encode, multiply = self.kernel.encoded, partial(self.kernel.forward_of, weight=weight, bias=bias)
        if self.chunks == 1:
            return multiply(_gathered(encode(x), self.group, self.sequence_dim))
        sizes = {"outputs": weight.size(0), "chunks": self.chunks}
        return gather_and_multiply(x, encode, multiply, self.group, self.sequence_dim, **sizes)

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, needed: Sequence[bool]) -> Gradients:
        """The gradients that are ``needed``, computed in the order of arXiv 2205.05198, section 4.2.2.

        The all-gather of x overlaps with the input gradient, and the reduction of the input gradient with the weight
        gradient. x is None if the weight gradient is not needed.
        """
        grad_weight = weight_gradient = summed = None
        rows = grad.flatten(0, -2)  # [r, o]
        if x is not None and self.deferred is not None and self.deferred.is_open:
            self.deferred.add(partial(self._start_weight_gradient, rows, x, weight), weight)
        elif x is not None:
            weight_gradient = self._start_weight_gradient(rows, x, weight)
        if needed[0]:
            summed = self._start_sum(self.kernel.input_gradient(rows, weight).view(*grad.shape[:-1], -1))
        if weight_gradient is not None:
            grad_weight, weight_gradient = weight_gradient(), None
        grad_bias = rows.sum(0) if needed[2] else None
        return summed() if summed is not None else None, grad_weight, grad_bias

    def _start_weight_gradient(self, rows: Tensor, x: Tensor, weight: Tensor) -> Callable[[], Tensor | None]:
        """Start to all-gather x; the returned function waits for it and computes the weight gradient."""
        if self.group is None or self.sequence_dim is None:
            return lambda: self.kernel.weight_gradient(rows, x.flatten(0, -2), weight)
        gathered = async_all_gather(x, self.group, self.sequence_dim)
        return lambda: self.kernel.weight_gradient(rows, gathered().flatten(0, -2), weight)

    def _start_sum(self, grad: Tensor) -> Callable[[], Tensor]:
        """Start to all-reduce or reduce-scatter ``grad``; the returned function waits for the result."""
        if self.group is None:
            return lambda: grad
        if self.sequence_dim is None:
            return async_all_reduce(grad, self.group)
        return async_reduce_scatter(grad, self.group, self.sequence_dim)


class _SumOverlap(_Overlap):
    """Forward and backward pass of a row-parallel linear layer: the output is summed, its gradient all-gathered."""

    group: ProcessGroup

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        multiply = partial(self.kernel.forward, weight=weight, bias=bias)
        if self.chunks == 1:
            return self._start_sum(multiply(x))()
        if self.sequence_dim is None:
            return multiply_and_reduce(x, multiply, self.group, chunks=self.chunks)
        if self.chunks == BY_RANK:
            return process_groups.multiply_and_scatter(x, weight, self.group, self.sequence_dim)
        return multiply_and_scatter(x, multiply, self.group, self.sequence_dim, chunks=self.chunks)

    def backward(self, grad: Tensor, x: Tensor | None, weight: Tensor, needed: Sequence[bool]) -> Gradients:
        if self.sequence_dim is not None and x is None and not needed[2]:
            encoded = self.kernel.encoded(grad, is_gradient=True)
            gathered = _gathered(encoded, self.group, self.sequence_dim)
            return self.kernel.input_gradient_of(gathered, weight), None, None
        if self.sequence_dim is not None:  # not encoded, since the weight gradient needs it as it is
            grad = all_gather(grad, self.group, self.sequence_dim)
        return _Overlap(None, None, self.kernel, self.deferred).backward(grad, x, weight, needed)


def _gathered(tensors: tuple[Tensor, ...], group: ProcessGroup, dim: int) -> tuple[Tensor, ...]:
    return tuple(all_gather(tensor, group, dim) for tensor in tensors)


_OVERLAPS = {False: _Overlap, True: _SumOverlap}
"""Whether the output is summed (row-parallel) to the class."""


class _Linear(torch.autograd.Function):
    """Autograd function that saves only a shard of the sequence, and gathers it again in the backward pass.

    If the weight is not trained, the input is neither saved nor gathered.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: _Overlap) -> Tensor:
        ctx.overlap = overlap
        # Saved-tensor hooks may return a different tensor, which would get the deferred gradient: keep the parameter.
        ctx.parameter = weight if isinstance(weight, nn.Parameter) else None
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return overlap.forward(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        weight = weight if ctx.parameter is None else ctx.parameter
        return *ctx.overlap.backward(grad, x, weight, ctx.needs_input_grad), None


# ``_Linear`` as a custom operator that is opaque to torch.compile: the compiler does not support asynchronous
# collectives, and would keep gathered tensors, since it never recomputes a collective. The operator's kernels cache no
# weights and accumulate no gradients.

_groups: WeakValueDictionary[str, ProcessGroup] = WeakValueDictionary()


def register_group(group: ProcessGroup) -> ProcessGroup:
    """Register ``group`` by name for compiled layers: operators cannot take process groups as arguments."""
    _groups[group.group_name] = group
    return group


@torch.library.custom_op("megatron::linear", mutates_args=())
def _linear_operator(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_dim: int | None,
    sums_outputs: bool = False,
    chunks: int = 1,
    recipe: str = "",
) -> Tensor:
    return _overlap(group, sequence_dim, sums_outputs, recipe, chunks).forward(x, weight, bias)


def _overlap(group_name: str, sequence_dim: int | None, sums_outputs: bool, recipe: str, chunks: int = 1) -> _Overlap:
    group = _groups[group_name]
    kernel = kernel_of(recipe, partial(largest_of_ranks, group=group), is_column_parallel=not sums_outputs)
    return _OVERLAPS[sums_outputs](group, sequence_dim, kernel, chunks=chunks)


@_linear_operator.register_fake
def _linear_shape(
    x: Tensor, weight: Tensor, _: Tensor | None, group: str, sequence_dim: int | None, sums_outputs: bool = False, *__
) -> Tensor:
    return _empty(x, weight.size(0), group, sequence_dim, gathers=not sums_outputs)


def _empty(x: Tensor, size: int, group: str, sequence_dim: int | None, *, gathers: bool) -> Tensor:
    """An empty tensor [b, s, size] for x [b, s, ..], with the sequence gathered or scattered."""
    shape, ranks = [*x.shape[:-1], size], _groups[group].size()
    if sequence_dim is not None:
        shape[sequence_dim] = shape[sequence_dim] * ranks if gathers else shape[sequence_dim] // ranks
    return x.new_empty(shape)


@torch.library.custom_op("megatron::linear_backward", mutates_args=())
def _gradients_operator(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    needed: list[bool],
    group: str,
    sequence_dim: int | None,
    sums_outputs: bool = False,
    recipe: str = "",
) -> list[Tensor]:
    gradients = _overlap(group, sequence_dim, sums_outputs, recipe).backward(grad, x, weight, needed)
    return [gradient for gradient in gradients if gradient is not None]


@_gradients_operator.register_fake
def _gradient_shapes(
    grad: Tensor, _: Tensor | None, weight: Tensor, needed: list[bool],
    group: str, sequence_dim: int | None, sums_outputs: bool = False, *__,
) -> list[Tensor]:  # fmt: skip
    x_grad = _empty(grad, weight.size(1), group, sequence_dim, gathers=sums_outputs)
    gradients = (x_grad, grad.new_empty(weight.shape), grad.new_empty(weight.shape[:1]))
    return [gradient for gradient, is_needed in zip(gradients, needed, strict=True) if is_needed]


def _operator_context(ctx, inputs: tuple, output: Tensor) -> None:
    x, weight, _, *ctx.place, _, ctx.recipe = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _operator_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    gradients = iter(_gradients_operator(grad, *ctx.saved_tensors, needed, *ctx.place, ctx.recipe))
    return *(next(gradients) if is_needed else None for is_needed in needed), *[None] * 5


_linear_operator.register_autograd(_operator_backward, setup_context=_operator_context)
