"""Collectives of gloo between the ranks of one host that are replaced: each rank sends to each other one directly.

torch 2.13, gloo: ``reduce_scatter_tensor`` is an all-reduce of a copy, of which each rank keeps its part, and
``all_gather_into_tensor`` takes as long as an all-reduce of the result, twice as long as its bytes need. For 30 MB
between two processes: 56 ms and 27 ms, and 17 ms and 14 ms with the functions of this module.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

TRACED = {"_gather": "all_gather_into_tensor", "_add_from_others": "reduce_scatter_tensor"}
"""Functions of this module that a trace shows, and the collectives in whose place they are."""


class Exchange(NamedTuple):
    """Tensors on their way between the ranks of a group."""

    works: list[dist.Work]

    def wait(self) -> None:
        """Wait until all have been sent and received."""
        for work in self.works:
            work.wait()


def exchange_shards_directly() -> None:
    """Let DeepSpeed gather and reduce-scatter shards over gloo by the functions of this module.

    DeepSpeed: comm/torch.py, ``TorchBackend`` calls torch's functions, which are slow on gloo.
    Test: tests/parallel/test_deepspeed_compat.py. Remove when torch's take no longer than an exchange.
    """
    backend = comm.comm.cdb
    backend.all_gather_function, backend.reduce_scatter_function = all_gather, reduce_scatter


def all_gather(
    output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Exchange | None:
    """Gather ``input_tensor`` of each rank into ``output_tensor``, in the order of the ranks. They may overlap."""
    group = group or dist.group.WORLD
    assert group is not None, "the process group has been joined"
    return _gather(output_tensor, input_tensor, group, async_op)


def _gather(output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> Exchange | None:
    parts = output_tensor.view(-1).chunk(group.size())
    own = input_tensor.view(-1)
    exchange = _exchange([own] * group.size(), parts, group)
    if parts[group.rank()].data_ptr() != own.data_ptr():
        parts[group.rank()].copy_(own)
    if async_op:
        return exchange
    exchange.wait()
    return None


def reduce_scatter(
    output_tensor: Tensor,
    input_tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Sum ``input_tensor`` over the ranks, and keep this rank's part of the sum. They may overlap."""
    group = group or dist.group.WORLD
    assert group is not None, "the process group has been joined"
    if async_op or op != dist.ReduceOp.SUM:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
    parts = input_tensor.view(-1).chunk(group.size())
    own = parts[group.rank()]
    if output_tensor.data_ptr() != own.data_ptr():
        output_tensor.view(-1).copy_(own)
    _add_from_others(parts, [output_tensor.view(-1)], group)
    return None


def reduce_to_owners(engine: DeepSpeedEngine) -> None:
    """At ZeRO 1 and 2: send each slice of a gradient to the rank that owns it, and nowhere else.

    DeepSpeed: runtime/zero/stage_1_and_2.py, ``allreduce_and_scatter`` sums a copy of every slice on every rank, and
    all but its owner discard it.
    Test: tests/training/test_layouts_agree.py. Remove when slices are reduced to their owners only.
    """
    optimizer = engine.optimizer
    if comm.comm.cdb.reduce_scatter_function is not reduce_scatter or not hasattr(optimizer, "allreduce_and_scatter"):
        return
    everywhere = optimizer.allreduce_and_scatter

    def reduce(bucket: Sequence[tuple], communication_data_type: torch.dtype, **options: Any) -> None:
        group = options.get("process_group") or optimizer.dp_process_group
        if options.get("divide", True) or any(len(owners) > 1 for owners, *_ in bucket):
            return everywhere(bucket, communication_data_type, **options)
        dtype = torch.float32 if optimizer.sequence_parallel_size > 1 else communication_data_type
        slices: list[list[Tensor]] = [[] for _ in range(group.size())]
        for (owner,), gradient, _ in bucket:
            slices[owner].append(gradient.to(dtype))
        own, slices[group.rank()] = slices[group.rank()], []
        _add_from_others([torch.cat(of_rank) if of_rank else None for of_rank in slices], own, group)
        mine = [(gradient, output) for owners, gradient, output in bucket if group.rank() in owners]
        for (gradient, output), total in zip(mine, own, strict=True):
            optimizer._add_to_grad_partition_buffer(output, total)
            if total is not gradient:
                gradient.copy_(total)
        return None

    optimizer.allreduce_and_scatter = reduce


def _add_from_others(sent: Sequence[Tensor | None], totals: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Send ``sent[rank]`` to each other rank, and add to ``totals``, which may be none, what they send for them.

    A rank may divide what it keeps otherwise than the others do, so that all of it is one message.
    """
    sizes = [total.numel() for total in totals]
    received = [totals[0].new_empty(sum(sizes)) if totals else None for _ in range(group.size())]
    _exchange(sent, received, group).wait()
    for rank in _others(group):
        if (of_rank := received[rank]) is not None:
            torch._foreach_add_(list(totals), of_rank.split(sizes))


def _exchange(sent: Sequence[Tensor | None], received: Sequence[Tensor | None], group: dist.ProcessGroup) -> Exchange:
    """Start to send ``sent[rank]`` to each other rank and to receive ``received[rank]`` from it, if there is any."""
    works: list[dist.Work | None] = []
    for rank in _others(group):
        if (to_fill := received[rank]) is not None and to_fill.numel():
            works.append(dist.irecv(to_fill, group=group, group_src=rank))
        if (to_send := sent[rank]) is not None and to_send.numel():
            works.append(dist.isend(to_send, group=group, group_dst=rank))
    return Exchange([work for work in works if work is not None])


def _others(group: dist.ProcessGroup) -> Iterator[int]:
    """Ranks of ``group`` but this one."""
    return (rank for rank in range(group.size()) if rank != group.rank())
