"""y = x W^T + b, whose backward pass loses no time.

- Where each rank of a group has rows of its own of W, the gradient of x is a sum over the group. It is under way while
  the gradient of W is computed.
- W can add up the gradients of a step's micro-batches where they are ("gradient accumulation fusion" in Megatron-LM):
  the product that is the gradient goes into ``weight.grad`` itself, instead of into a tensor that is then added to it.

i inputs, o outputs of this rank, r rows of x: the product of all its dimensions but the last
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.mpu.mappings import copy_to_model_parallel_region


def accumulate_in_place(weight: nn.Parameter) -> None:
    """From the second micro-batch of a step on, let ``linear`` add to ``weight.grad``.

    Autograd then has no gradient to hand to hooks of the weight: for engines that leave ``weight.grad`` alone until
    the step.
    """
    weight.accumulates_in_place = True


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, group: ProcessGroup | None = None) -> Tensor:
    """x [.., i], weight [o, i], bias [o] -> [.., o]; with ``group`` the gradient of x is the sum over its ranks."""
    summed = group is not None and group.size() > 1
    if torch.compiler.is_compiling():  # the compiler knows nothing that is under way
        return F.linear(copy_to_model_parallel_region(x, group) if summed else x, weight, bias)
    if summed or getattr(weight, "accumulates_in_place", False):
        return _Linear.apply(x, weight, bias, group if summed else None)
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        under_way = ctx.group is not None and grad_x is not None
        summing = dist.all_reduce(grad_x, group=ctx.group, async_op=True) if under_way else None
        rows = grad.flatten(0, -2)
        grad_weight = _weight_gradient(rows, x.flatten(0, -2), weight) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        if summing is not None:
            summing.wait()
        return grad_x, grad_weight, grad_bias, None


def _weight_gradient(rows: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """rows [r, o], x [r, i] -> [o, i]; None where it went into the gradient that ``weight`` has."""
    if weight.grad is None or not getattr(weight, "accumulates_in_place", False):
        return rows.t() @ x
    weight.grad.addmm_(rows.t(), x)
    return None
