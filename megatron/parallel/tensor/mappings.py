"""Mappings into and out of a tensor-parallel region, in conjugate pairs: each is another's backward.

Outside the region every rank of the group holds the same tensor; inside, each holds its own.
The first four mappings are those of Megatron-LM (arXiv 1909.08053, section 3). The last three
map to and from a region in which each rank holds a shard of the sequence (arXiv 2205.05198,
section 4.2.2): all-gather and reduce-scatter, which together move as much as one all-reduce.

b batch, s sequence, h hidden, t ranks of the group
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
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

    For tensors that are equal on every rank.
    """
    return _Scatter.apply(x, group, dim) if group.size() > 1 else x


def gather_from_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather the sequence forward, reduce-scatter backward: [b, s/t, h] -> [b, s, h] for ``dim`` 1.

    For the input of a tensor-parallel region, in which each rank's gradient is a partial sum.
    """
    return _GatherSequence.apply(x, group, dim) if group.size() > 1 else x


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter the sequence forward, all-gather backward: [b, s, h] -> [b, s/t, h] for ``dim`` 1."""
    return _ReduceScatterSequence.apply(x, group, dim) if group.size() > 1 else x


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, dtype: torch.dtype, group: ProcessGroup
) -> dict[str, Tensor]:
    """Send the tensors named ``keys`` from the first rank of the group to the others.

    ``data`` is read on that rank only. Shapes are sent first, then all tensors in one message of type ``dtype``.

    Raises ValueError on the first rank if a tensor is of another type.
    """
    device = get_accelerator().current_device_name()
    source = dist.get_global_rank(group, 0)
    tensors = [data[key] for key in keys] if data is not None and group.rank() == 0 else []
    for key, tensor in zip(keys, tensors, strict=False):
        if tensor.dtype != dtype:
            raise ValueError(f"broadcast_data: {key} is {tensor.dtype}, not {dtype}")
    message = [[tensor.shape for tensor in tensors]]
    dist.broadcast_object_list(message, src=source, group=group)
    shapes = message[0]
    sizes = [shape.numel() for shape in shapes]
    if group.rank() == 0:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    dist.broadcast(flat, src=source, group=group)
    return {key: part.view(shape) for key, part, shape in zip(keys, flat.split(sizes), shapes, strict=True)}


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
        return _local_shard(x, group, dim)

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
        return _local_shard(grad, ctx.group, ctx.dim), None, None


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


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of the ranks' ``x``, in a new tensor."""
    summed = x.clone(memory_format=torch.contiguous_format)  # autograd's tensors must not be overwritten
    dist.all_reduce(summed, group=group)
    return summed


def _local_shard(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
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
