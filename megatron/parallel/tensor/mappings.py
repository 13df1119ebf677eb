"""Mappings into and out of tensor-parallel regions, in conjugate pairs: each is the backward pass of another.

Outside the region all ranks of the group have the same tensor; inside, each rank has a different one.
The first four mappings are from Megatron-LM (arXiv 1909.08053, section 3). The other three
map to and from a region in which each rank has a shard of the sequence (arXiv 2205.05198,
section 4.2.2): all-gather and reduce-scatter, which together transfer as much as one all-reduce.

b batch, s sequence, h hidden, t ranks of the group
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def copy_to_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward, all-reduce backward."""
    return mapped(x, group, _identity, all_reduce)


def reduce_from_model_parallel_region(x: Tensor, group: ProcessGroup, *, overwrites: bool = False) -> Tensor:
    """All-reduce forward, which may overwrite ``x``, identity backward."""
    return mapped(x, group, _all_reduce_in_place if overwrites else all_reduce, _identity)


def scatter_to_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Keep this rank's part of the last dimension forward, all-gather backward: [.., i] -> [.., i/t]."""
    return scatter_to_sequence_parallel_region(x, group, -1)


def gather_from_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather the last dimension forward, keep this rank's part backward: [.., o/t] -> [.., o]."""
    return mapped(x, group, partial(all_gather, dim=-1), partial(_local_shard, dim=-1))


def scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Keep this rank's part of the sequence forward, all-gather backward: [b, s, h] -> [b, s/t, h] for ``dim`` 1.

    The input must be equal on all ranks.
    """
    return mapped(x, group, partial(_local_shard, dim=dim), partial(all_gather, dim=dim))


def gather_from_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather the sequence forward, reduce-scatter backward: [b, s/t, h] -> [b, s, h] for ``dim`` 1.

    For the input of a tensor-parallel region, in which each rank's gradient is a partial sum.
    """
    return mapped(x, group, partial(all_gather, dim=dim), partial(_reduce_scatter, dim=dim))


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Reduce-scatter the sequence forward, all-gather backward: [b, s, h] -> [b, s/t, h] for ``dim`` 1."""
    return mapped(x, group, partial(_reduce_scatter, dim=dim), partial(all_gather, dim=dim))


Collective = Callable[[Tensor, ProcessGroup], Tensor]


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, context: Any, forward: Callable, backward: Callable) -> Tensor:
        ctx.context, ctx.conjugate = context, backward
        return forward(x, context)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.conjugate(grad, ctx.context), None, None, None


conjugate = _Conjugate.apply
"""conjugate(x, context, forward, backward) -> forward(x, context); its gradient is backward(grad, context)."""


def mapped(x: Tensor, group: ProcessGroup, forward: Collective, backward: Collective) -> Tensor:
    """forward(x, group), with gradient backward(grad, group); ``x`` itself in a group of one rank."""
    return conjugate(x, group, forward, backward) if group.size() > 1 else x


AsyncCollective = Callable[[Tensor, ProcessGroup], Callable[[], Tensor]]
"""Starts a collective; the returned function waits for its result."""


def start_mapped(
    x: Tensor, group: ProcessGroup, forward: AsyncCollective, backward: AsyncCollective
) -> Callable[[], Tensor]:
    """Start the collective ``forward`` of ``x``; the returned function waits for it. Computation in between overlaps.

    In the backward pass, the gradients of the same operations overlap with the collective ``backward``.
    """
    running: list[Callable[[], Tensor]] = []

    def start(collective: AsyncCollective, x: Tensor, group: ProcessGroup) -> Tensor:
        running.append(collective(x, group))
        return x.new_empty(0)  # connects both nodes in the autograd graph

    def wait(_: Tensor, group: ProcessGroup) -> Tensor:
        return running.pop()()

    started = conjugate(x, group, partial(start, forward), wait)
    return lambda: conjugate(started, group, wait, partial(start, backward))


def _identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


def largest_of_ranks(x: Tensor, group: ProcessGroup) -> Tensor:
    """The maximum of x over the ranks, in place."""
    if group.size() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce (sum) into a new tensor."""
    summed = x.clone(memory_format=torch.contiguous_format)  # autograd's tensors must not be overwritten
    dist.all_reduce(summed, group=group)
    return summed


def _all_reduce_in_place(x: Tensor, group: ProcessGroup) -> Tensor:
    summed = x.detach().contiguous()
    dist.all_reduce(summed, group=group)
    return summed


def _local_shard(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].contiguous()


def all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather along ``dim``: [b, s/t, h] -> [b, s, h] for ``dim`` 1."""
    stacked, _ = _start_all_gather(x, group, async_op=False)
    return _unstack(stacked, group, dim)


def async_all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Callable[[], Tensor]:
    """Start ``all_gather``; the returned function waits for the result, and owns its memory."""
    stacked, work = _start_all_gather(x, group, async_op=True)
    return lambda: _unstack(_when_done(stacked, work), group, dim)


def async_all_reduce(x: Tensor, group: ProcessGroup) -> Callable[[], Tensor]:
    """Start an all-reduce (sum) in place; the returned function waits for it."""
    work = dist.all_reduce(x, group=group, async_op=True)
    return lambda: _when_done(x, work)


def async_reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Callable[[], Tensor]:
    """Start a reduce-scatter (sum) along ``dim``; the returned function waits for this rank's part."""
    summed, work = _start_reduce_scatter(x, group, dim, async_op=True)
    return lambda: _when_done(summed, work)


def async_all_to_all(
    rows: Tensor, group: ProcessGroup, sent: Sequence[int], received: Sequence[int]
) -> Callable[[], Tensor]:
    """Start an all-to-all of rows, ``sent[r]`` to and ``received[r]`` from rank r: [n, h] -> [m, h]."""
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    work = dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group, async_op=True)
    return lambda: _when_done(output, work)


def _when_done(x: Tensor, work: dist.Work) -> Tensor:
    work.wait()
    return x


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    return _start_reduce_scatter(x, group, dim, async_op=False)[0]


def _start_all_gather(x: Tensor, group: ProcessGroup, *, async_op: bool) -> tuple[Tensor, dist.Work]:
    """All-gather along the first dimension: [b, s/t, h] -> [t x b, s/t, h]."""
    stacked = x.new_empty((group.size() * x.size(0), *x.shape[1:]))
    return stacked, dist.all_gather_into_tensor(stacked, x.contiguous(), group=group, async_op=async_op)


def _unstack(stacked: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """[t x b, s/t, h] -> [b, s, h] for ``dim`` 1; a view for dim 0 or a single sample, otherwise a copy."""
    dim = dim % stacked.dim()
    return stacked.unflatten(0, (group.size(), -1)).movedim(0, dim).flatten(dim, dim + 1)


def _start_reduce_scatter(x: Tensor, group: ProcessGroup, dim: int, *, async_op: bool) -> tuple[Tensor, dist.Work]:
    """[b, s, h] -> [b, s/t, h] for ``dim`` 1; like ``_unstack`` it copies unless the parts are consecutive."""
    dim = dim % x.dim()
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()  # [t, b, s/t, h]
    summed = torch.empty_like(parts[0])
    return summed, dist.reduce_scatter_tensor(summed, parts.flatten(0, 1), group=group, async_op=async_op)
