"""Matmuls of linear layers: output, input gradient, weight gradient.

A layer has one weight, or several weights for different rows, such as experts.

r rows: all tokens of a rank, n rows of all weights, e weights, i inputs, o outputs of a weight
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from megatron.config import ModelConfig


class LinearKernel:
    """y = x W^T + b and its gradients, in plain torch.

    There is one object for each weight. The weight is passed to every call, since ZeRO 3 gathers it only for the call.
    A low-precision variant can quantize weight, input and gradient in the methods, and cache the quantized weight until
    ``weight._version`` changes.
    """

    has_own_gradients = False
    """Whether gradients must be computed with the methods below instead of by autograd through ``forward``."""
    recipe = ""
    """Name of the arithmetic for custom operators, which take no objects; empty for plain torch."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., i], weight [o, i], bias [o] -> [.., o]."""
        return F.linear(x, weight, bias)

    def traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``forward`` for torch.compile, differentiable by autograd without the methods below."""
        return self.forward(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Gradient of the input: grad [r, o], weight [o, i] -> [r, i]."""
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """Gradient of the weight: grad [r, o], x [r, i] -> [o, i]; None if it was added to ``weight.grad``."""
        return grad.t() @ x

    def encoded(self, x: Tensor, *, is_gradient: bool = False) -> tuple[Tensor, ...]:
        """The tensors [.., n] to all-gather instead of inputs or gradients [.., k], such as quantized ones."""
        return (x,)

    def forward_of(self, encoded: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        """``forward`` of gathered ``encoded`` inputs."""
        (x,) = encoded
        return self.forward(x, weight, bias)

    def input_gradient_of(self, encoded: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        """``input_gradient`` of gathered ``encoded`` gradients: [.., o] -> [.., i]."""
        (grad,) = encoded
        return self.input_gradient(grad.flatten(0, -2), weight).unflatten(0, grad.shape[:-1])


class AccumulatingLinearKernel(LinearKernel):
    """Accumulates the weight gradient into ``weight.grad`` within the matmul, from the second micro-batch of a step on.

    Requires engines that do not touch ``weight.grad`` before the step, and weights without hooks, which would get no
    gradient.
    """

    has_own_gradients = True

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        if not weight.is_leaf or weight.grad is None:
            return super().weight_gradient(grad, x, weight)
        weight.grad.addmm_(grad.t(), x)
        return None


def linear_kernel(config: ModelConfig) -> type[LinearKernel]:
    """The kernel class for the linear layers of a model."""
    return AccumulatingLinearKernel if config.gradient_accumulation_fusion else LinearKernel


class StackedLinearKernel:
    """y = x W^T and its gradients for several weights with different rows: one matmul per weight.

    ``rows`` is the result of ``rows_of`` for the ends of each weight's rows [e], on the device. Results for rows after
    the last end are undefined. This variant needs the sizes on the host, which has to wait for them.
    """

    def rows_of(self, ends: Tensor) -> Any:
        """Prepare ``rows`` from the ends of each weight's rows [e], once for all linear layers with the same rows."""
        return ends.diff(prepend=ends.new_zeros(1)).tolist()

    def forward(self, x: Tensor, weight: Tensor, rows: Any) -> Tensor:
        """x [n, i] sorted by weight, weight [e, o, i] -> [n, o]."""
        output = x.new_empty(x.size(0), weight.size(1))
        for x_part, matrix, out in zip(_parts(x, rows), weight, _parts(output, rows), strict=True):
            torch.mm(x_part, matrix.t(), out=out)
        return output

    def input_gradient(self, grad: Tensor, weight: Tensor, rows: Any) -> Tensor:
        """Gradient of the input: grad [n, o], weight [e, o, i] -> [n, i]."""
        return self.forward(grad, weight.transpose(1, 2), rows)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, rows: Any) -> Tensor:
        """Gradient of the weights: grad [n, o], x [n, i] -> [e, o, i]."""
        weight_grad = torch.empty_like(weight)
        for grad_part, x_part, out in zip(_parts(grad, rows), _parts(x, rows), weight_grad, strict=True):
            torch.mm(grad_part.t(), x_part, out=out)
        return weight_grad


def _parts(x: Tensor, rows: list[int]) -> tuple[Tensor, ...]:
    return x[: sum(rows)].split(rows)


class GroupedLinearKernel(StackedLinearKernel):
    """Grouped GEMM for all weights, which reads row ends on the device; bf16, sizes in multiples of 8."""

    def rows_of(self, ends: Tensor) -> Any:
        return ends.int()

    def forward(self, x: Tensor, weight: Tensor, rows: Any) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=rows) if len(x) else x.new_empty(0, weight.size(1))

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, rows: Any) -> Tensor:
        if not len(x):
            return torch.zeros_like(weight)
        # Some kernels do not write the gradient of a weight without rows: https://github.com/pytorch/pytorch/issues/172439
        is_empty = rows == F.pad(rows[:-1], (1, 0))
        return F.grouped_mm(grad.t(), x, offs=rows).masked_fill_(is_empty.view(-1, 1, 1), 0)


class EqualLinearKernel(StackedLinearKernel):
    """Batched matmul for weights with equal numbers of rows."""

    def rows_of(self, ends: Tensor) -> Any:
        return None

    def forward(self, x: Tensor, weight: Tensor, rows: Any) -> Tensor:
        return torch.bmm(x.unflatten(0, (len(weight), -1)), weight.transpose(1, 2)).flatten(0, 1)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor, rows: Any) -> Tensor:
        by_weight = (len(weight), -1)
        return torch.bmm(grad.unflatten(0, by_weight).transpose(1, 2), x.unflatten(0, by_weight))


def stacked_linear_kernel(config: ModelConfig, *sizes: int) -> StackedLinearKernel:
    """The kernel for several weights with these ``sizes`` of inputs and outputs."""
    if config.moe_pad_expert_input_to_capacity:
        return EqualLinearKernel()
    is_grouped = config.moe_grouped_gemm and get_accelerator().device_name() == "cuda" and config.dtype == "bf16"
    return GroupedLinearKernel() if is_grouped and not any(size % 8 for size in sizes) else StackedLinearKernel()


Defer = Callable[[Callable[[], Tensor], Tensor], bool]
"""(function that computes a weight gradient, the weight) -> whether it is deferred, to be computed later."""


def stacked_linear(x: Tensor, weight: Tensor, rows: Any, kernel: StackedLinearKernel, defer: Defer) -> Tensor:
    """x [n, i] sorted by weight, weight [e, .., o, i] -> [n, .. x o]; ``rows`` is the result of ``kernel.rows_of``."""
    output: Tensor = _StackedLinear.apply(x, weight, rows, kernel, defer)
    return output


class _StackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Any, kernel: StackedLinearKernel, defer: Defer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.kernel, ctx.defer = rows, kernel, defer
        return kernel.forward(x, weight.flatten(1, -2), rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, kernel, matrices, grad = ctx.rows, ctx.kernel, weight.flatten(1, -2), grad.contiguous()

        def weight_gradient() -> Tensor:
            return kernel.weight_gradient(grad, x, matrices, rows).view_as(weight)

        is_deferred = ctx.defer(weight_gradient, weight)
        x_grad = kernel.input_gradient(grad, matrices, rows)
        return x_grad, None if is_deferred else weight_gradient(), None, None, None
