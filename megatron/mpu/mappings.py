"""Crossing the border of a tensor-parallel region: each crossing is another's backward.

Outside the region every rank of the group holds the same tensor; inside, each holds its own.
The four crossings are those of Megatron-LM (arXiv 1909.08053, section 3).
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def copy_to_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward, all-reduce backward."""
    return _Copy.apply(x, group) if group.size() > 1 else x


def reduce_from_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce forward, identity backward."""
    return _Reduce.apply(x, group) if group.size() > 1 else x


def scatter_to_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Keep this rank's part of the last dimension forward, all-gather backward: [.., i] -> [.., i/t]."""
    return _Scatter.apply(x, group) if group.size() > 1 else x


def gather_from_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather the last dimension forward, keep this rank's part backward: [.., o/t] -> [.., o]."""
    return _Gather.apply(x, group) if group.size() > 1 else x


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _own_part(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _own_part(grad, ctx.group), None


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    summed = x.clone(memory_format=torch.contiguous_format)  # autograd's tensors are not ours to overwrite
    dist.all_reduce(summed, group=group)
    return summed


def _own_part(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=-1)[group.rank()].contiguous()


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
