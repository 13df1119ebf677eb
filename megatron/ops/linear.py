"""The matmuls of linear layers: output, gradient of the input, gradient of the weight.

A layer has one weight, or several that each have their own rows, such as experts.

r rows: all tokens of a rank, n rows of all weights, e weights, i inputs, o outputs
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional as F

from megatron.config import ModelConfig


class LinearKernel:
    """y = x W^T + b and its gradients, in plain torch.

    A layer makes one object for each weight, and passes the weight to every call, since ZeRO 3 gathers it for the call
    only. A variant of lower precision can so quantize weight, input and gradient where they are used, and keep the
    quantized weight in the object until ``weight._version`` changes.
    """

    has_own_gradients = False
    """Whether the gradients of a layer come from the methods below also where autograd could derive those of
    ``forward``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., i], weight [o, i], bias [o] -> [.., o]."""
        return F.linear(x, weight, bias)

    def traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``forward`` with its gradients, for torch's compiler, which does not call the methods below."""
        return self.forward(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [r, o], weight [o, i] -> [r, i]."""
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """grad [r, o], x [r, i] -> [o, i]; None if it was added to ``weight.grad``."""
        return grad.t() @ x


class AccumulatingLinearKernel(LinearKernel):
    """Adds the weight's gradient to ``weight.grad`` from the second micro-batch of a step on, within the matmul.

    For engines that do not touch ``weight.grad`` before the step, and weights without hooks, which would receive no
    gradient.
    """

    has_own_gradients = True

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        if not weight.is_leaf or weight.grad is None:
            return super().weight_gradient(grad, x, weight)
        weight.grad.addmm_(grad.t(), x)
        return None


def linear_kernel(config: ModelConfig) -> type[LinearKernel]:
    """The class for the linear layers of a model."""
    return AccumulatingLinearKernel if config.gradient_accumulation_fusion else LinearKernel


WeightGradient = Callable[[], Tensor]
Defer = Callable[[WeightGradient, Tensor], bool]
"""(gradient of a weight, the weight) -> whether the gradient will be computed later."""
StackedLinearKernel = Callable[[Tensor, Tensor, list[int], Defer], Tensor]
"""(x [n, i], weight [e, .., o, i], rows of each weight, defer) -> [n, o]: the first ``counts[0]`` rows of x with the
first weight, and so on."""


def stacked_linear_kernel(config: ModelConfig) -> StackedLinearKernel:
    """One kernel for all weights with ``--moe-grouped-gemm`` on a GPU, and a matmul for each otherwise."""
    is_grouped = config.moe_grouped_gemm and get_accelerator().device_name() == "cuda"
    return grouped if is_grouped else one_by_one


def grouped(x: Tensor, weight: Tensor, counts: list[int], defer: Defer) -> Tensor:
    """In one kernel, which is for bf16. Not all kernels write the gradient of a weight without rows."""
    if x.dtype != torch.bfloat16 or min(counts) == 0:
        return one_by_one(x, weight, counts, defer)
    ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(x, weight.flatten(1, -2).transpose(1, 2), offs=ends)


def one_by_one(x: Tensor, weight: Tensor, counts: list[int], defer: Defer) -> Tensor:
    """In plain torch: matmuls that write into one tensor, without copies."""
    output: Tensor = _OneByOne.apply(x, weight, counts, defer)
    return output


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], defer: Defer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.defer = counts, defer
        output = x.new_empty(x.size(0), weight[0].numel() // x.size(1))
        for rows, matrix, out in zip(x.split(counts), weight.flatten(1, -2), output.split(counts), strict=True):
            torch.mm(rows, matrix.t(), out=out)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        weight_gradient = partial(_weight_gradient, grad, x, weight, ctx.counts)
        is_deferred = ctx.defer(weight_gradient, weight)
        of_x = torch.empty_like(x)
        parts = zip(grad.split(ctx.counts), weight.flatten(1, -2), of_x.split(ctx.counts), strict=True)
        for of_rows, matrix, out in parts:
            torch.mm(of_rows, matrix, out=out)
        return of_x, None if is_deferred else weight_gradient(), None, None


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """grad [n, o], x [n, i] -> [e, .., o, i]."""
    of_weight = torch.empty_like(weight)
    parts = zip(grad.split(counts), x.split(counts), of_weight.flatten(1, -2), strict=True)
    for of_rows, rows, out in parts:
        torch.mm(of_rows.t(), rows, out=out)
    return of_weight
