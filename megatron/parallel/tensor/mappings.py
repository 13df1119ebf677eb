"""Crossing the border of a tensor-parallel region: each crossing is another's backward.

Outside the region every rank of the group holds the same tensor; inside, each holds its own.
The first four crossings are those of Megatron-LM (arXiv 1909.08053, section 3). The last three
cross to and from a region where each rank holds its part of the sequence (arXiv 2205.05198,
section 4.2.2): all-gather and reduce-scatter, which together move as much as one all-reduce.

b batch, s sequence, h hidden, t ranks of the group
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
    return _Scatter.apply(x, group, -1) if group.size() > 1 else x


def gather_from_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather the last dimension forward, keep this rank's part backward: [.., o/t] -> [.., o]."""
    return _Gather.apply(x, group, -1) if group.size() > 1 else x


def scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Keep this rank's part of the sequence forward, all-gather backward: [b, s, h] -> [b, s/t, h] for ``dim`` 1.

    For what every rank holds whole and all alike.
    """
    return _Scatter.apply(x, group, dim) if group.size() > 1 else x


def gather_from_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather the sequence forward, reduce-scatter backward: [b, s/t, h] -> [b, s, h] for ``dim`` 1.

    For what enters a tensor-parallel region, where each rank's gradient is a part of a sum.
    """
    return _GatherSequence.apply(x, group, dim) if group.size() > 1 else x


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter the sequence forward, all-gather backward: [b, s, h] -> [b, s/t, h] for ``dim`` 1."""
    return _ReduceScatterSequence.apply(x, group, dim) if group.size() > 1 else x


def exchange_parts(x: Tensor, group: ProcessGroup, *, cut: int, join: int) -> Tensor:
    """All-to-all: the n-th part of dimension ``cut`` goes to rank n, and what comes is joined along ``join``.

    Backward is the same with ``cut`` and ``join`` exchanged. For heads [b, n, s/t, d] with ``cut=1, join=2``:
    each rank gets its part of the heads for the whole of the sequence, [b, n/t, s, d] (arXiv 2309.14509).
    """
    return _ExchangeParts.apply(x, group, cut, join)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _own_part(x, group, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _own_part(grad, ctx.group, ctx.dim), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.group, ctx.dim), None, None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim), None, None


class _ExchangeParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        return _all_to_all(x, group, cut, join)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.group, ctx.join, ctx.cut), None, None, None


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' ``x``, in a tensor of its own."""
    summed = x.clone(memory_format=torch.contiguous_format)  # autograd's tensors are not ours to overwrite
    dist.all_reduce(summed, group=group)
    return summed


def _own_part(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = [part.contiguous() for part in x.chunk(group.size(), dim)]
    summed = torch.empty_like(parts[0])
    dist.reduce_scatter(summed, parts, group=group)
    return summed


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _all_to_all(x: Tensor, group: ProcessGroup, cut: int, join: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), join)
