"""The matrix product of parallel layers, which communicates while other products are computed.

t ranks of the group, i inputs, o outputs, r rows: all tokens of a rank, b x s
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.nn import functional as F

from megatron.parallel.tensor.deferred import open_products
from megatron.parallel.tensor.mappings import all_gather, async_all_gather, async_all_reduce, async_reduce_scatter
from megatron.parallel.tensor.products import add_product, affine, is_for_onednn, product

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of x, weight and bias."""


def accumulate_in_place(weight: nn.Parameter) -> None:
    """Let ``linear`` add to ``weight.grad`` from the second micro-batch of a step on.

    Hooks would then receive no gradient: a weight that has any is left as it is, and this is for engines that do not
    touch ``weight.grad`` before the step.
    """
    if not weight._backward_hooks:
        weight.accumulates_in_place = True  # type: ignore[attr-defined]  # a mark of ours on the parameter


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: ProcessGroup | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """x [.., i], weight [o, i], bias [o] -> [.., o]; with ``group`` the gradient of x is the sum over its ranks.

    With ``sequence_dim`` x is this rank's shard along it, such as [b, s/t, i] for 1: the output is that of all shards,
    [b, s, o], and the gradient of x this rank's shard of the sum.
    """
    if group is None or group.size() == 1:
        group = sequence_dim = None
    by_onednn = is_for_onednn(x, weight)
    if torch.compiler.is_compiling():
        if group is None and not by_onednn:
            return F.linear(x, weight, bias)
        return _linear_operator(x, weight, bias, group.group_name if group is not None else "", sequence_dim)
    if (
        by_onednn
        or group is not None
        or getattr(weight, "accumulates_in_place", False)
        or getattr(weight, "deferred_products", None)
    ):
        return _Linear.apply(x, weight, bias, group, sequence_dim)
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """Of a shard of the sequence only the shard is kept, and gathered once more in the backward pass.

    Nothing is kept or gathered for a weight that is not trained.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, sequence_dim: int | None
    ) -> Tensor:
        _keep(ctx, (x, weight, bias, group, sequence_dim), None)
        return _forward(x, weight, bias, group, sequence_dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients = _backward(grad, x, weight, ctx.needs_input_grad, ctx.group, ctx.sequence_dim)
        return *gradients, None, None


def _keep(ctx, inputs: tuple, output: None) -> None:
    x, weight, _, ctx.group, ctx.sequence_dim = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None, sequence_dim: int | None
) -> Tensor:
    if group is not None and sequence_dim is not None:
        x = all_gather(x, group, sequence_dim)
    return affine(x, weight, bias)


def _backward(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor,
    needed: Sequence[bool],
    group: ProcessGroup | None,
    sequence_dim: int | None,
) -> Gradients:
    """Gradients that are ``needed``, in the order of arXiv 2205.05198, section 4.2.2.

    The shards are gathered while the gradient of x is computed, and its sum is formed while the gradient of the weight
    is computed. x is None if the weight's is not needed.
    """
    grad_weight = gathered = summed = None
    rows = grad.flatten(0, -2)  # [r, o]
    if x is not None and (deferred := open_products(weight)):
        deferred.add(partial(_start_product, rows, x, weight, group, sequence_dim), weight)
        x = None
    if x is not None and group is not None and sequence_dim is not None:
        gathered = async_all_gather(x, group, sequence_dim)
    if needed[0]:
        summed = _async_sum(product(rows, weight).view(*grad.shape[:-1], -1), group, sequence_dim)
    if gathered is not None:
        x, gathered = gathered(), None
    if x is not None:
        grad_weight = _weight_gradient(rows, x.flatten(0, -2), weight)
    grad_bias = rows.sum(0) if needed[2] else None
    return summed() if summed is not None else None, grad_weight, grad_bias


def _async_sum(grad: Tensor, group: ProcessGroup | None, sequence_dim: int | None) -> Callable[[], Tensor]:
    """Start to sum the ranks' ``grad``; the function returned waits for the sum, or for this rank's shard of it."""
    if group is None:
        return lambda: grad
    return async_all_reduce(grad, group) if sequence_dim is None else async_reduce_scatter(grad, group, sequence_dim)


def _start_product(
    rows: Tensor, x: Tensor, weight: Tensor, group: ProcessGroup | None, sequence_dim: int | None
) -> Callable[[], Tensor | None]:
    """The gradient of a weight by itself; with ``sequence_dim`` start to gather the shards of x for it."""
    if group is None or sequence_dim is None:
        return lambda: _weight_gradient(rows, x.flatten(0, -2), weight)
    gathered = async_all_gather(x, group, sequence_dim)
    return lambda: _weight_gradient(rows, gathered().flatten(0, -2), weight)


def _weight_gradient(rows: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """rows [r, o], x [r, i] -> [o, i]; None if it was added to ``weight.grad``."""
    if not getattr(weight, "accumulates_in_place", False) or weight.grad is None:
        return product(rows.t(), x)
    add_product(weight.grad, rows.t(), x)
    return None


def _group(name: str) -> ProcessGroup | None:
    return None if not name else _resolve_process_group(GroupName(name))


# ``_Linear`` as an operator that the compiler does not look into: it supports no asynchronous collectives, and keeps
# what is gathered, since it never repeats a collective.


@torch.library.custom_op("megatron::linear", mutates_args=())
def _linear_operator(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_dim: int | None) -> Tensor:
    return _forward(x, weight, bias, _group(group), sequence_dim)


@_linear_operator.register_fake
def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_dim: int | None) -> Tensor:
    shape = [*x.shape[:-1], weight.size(0)]
    if sequence_dim is not None:
        shape[sequence_dim] *= _resolve_process_group(GroupName(group)).size()
    return x.new_empty(shape)


@torch.library.custom_op("megatron::linear_backward", mutates_args=())
def _gradients_operator(
    grad: Tensor, x: Tensor | None, weight: Tensor, needed: list[bool], group: str, sequence_dim: int | None
) -> list[Tensor]:
    found = _backward(grad, x, weight, needed, _group(group), sequence_dim)
    return [gradient for gradient in found if gradient is not None]


@_gradients_operator.register_fake
def _gradient_shapes(
    grad: Tensor, x: Tensor | None, weight: Tensor, needed: list[bool], group: str, sequence_dim: int | None
) -> list[Tensor]:
    shape = [*grad.shape[:-1], weight.size(1)]
    if sequence_dim is not None:
        shape[sequence_dim] //= _resolve_process_group(GroupName(group)).size()
    shapes = (shape, weight.shape, weight.shape[:1])
    return [grad.new_empty(one) for one, is_needed in zip(shapes, needed, strict=True) if is_needed]


def _operator_backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:3])
    x, weight = ctx.saved_tensors
    found = iter(_gradients_operator(grad, x, weight, needed, ctx.group, ctx.sequence_dim))
    return *(next(found) if is_needed else None for is_needed in needed), None, None


_linear_operator.register_autograd(_operator_backward, setup_context=_keep)
