"""The process group: gloo, with the collectives that go through the memory of its ranks.

An asynchronous collective has published its message when it returns, and reads those of the others in ``wait()``, or
before the next collective of the group.
"""

from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from megatron.parallel.shared_memory.memory import NAME, SLOT, GroupMemory, join_memory

_PART = 2**20
"""Bytes of a message. A larger tensor is sent in parts, which stay in the cache between two cores."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
"""Types of tensors that go through shared memory."""

Messages = Generator[None, None, None]
"""The steps of a collective: it stops after each message that it has written, and continues once all have published."""


def backend_of_groups(device: str) -> str | None:
    """``NAME`` for groups of gloo on the CPU; None for the backend of the default group."""
    if device != "cpu" or dist.get_backend() != "gloo":
        return None
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
    return NAME


_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER = AllreduceOptions(), ReduceScatterOptions(), AllgatherOptions()
Options = AllreduceOptions | ReduceScatterOptions | AllgatherOptions


def _left_to_gloo(name: str) -> Any:
    """A method of ``SharedMemoryGroup`` that calls gloo's ``name``.

    torch 2.13: what a group in Python does not define itself is called with Python's lock held. A thread of gloo's that
    needs the lock, to free a tensor, and has gloo's own would wait forever.
    """

    def call(self: "SharedMemoryGroup", *arguments: Any, **options: Any) -> Work:
        return getattr(self._gloo, name)(*arguments, **options)

    return call


class SharedMemoryGroup(ProcessGroup):
    """A process group of gloo whose sums and gathers go through shared memory if all its ranks are on this host."""

    broadcast, allgather, allreduce_coalesced, barrier, send, recv, all_to_all_single = map(
        _left_to_gloo,
        ("broadcast", "allgather", "allreduce_coalesced", "barrier", "send", "recv", "alltoall_base"),
    )
    reduce, gather, scatter, alltoall, recv_anysource = map(
        _left_to_gloo, ("reduce", "gather", "scatter", "alltoall", "recv_anysource")
    )

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # with a store, Python's methods would not be called
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._gloo)
        self.memory = join_memory(store, rank, size, timeout)
        """None where gloo does everything."""

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions = _ALL_REDUCE) -> Work:  # type: ignore[override]
        """Sum ``tensors[0]`` over the ranks, in place; every rank has the same bits."""
        if self.memory is None or len(tensors) > 1 or not self._suits(opts, tensors):
            return self._gloo.allreduce(tensors, opts)
        flat = _flat(tensors[0])
        return Pending(self.memory, _all_reduce(self.memory, flat, opts.asyncOp), tensors[0], flat)

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> Work:
        """Sum ``inputs[0][rank]`` over the ranks into ``outputs[0]``; each rank may have another number of elements."""
        if self.memory is None or len(outputs) > 1 or not self._suits(opts, [*outputs, *inputs[0]]):
            return self._gloo.reduce_scatter(outputs, inputs, opts)
        total, parts = _flat(outputs[0]), [_flat(part) for part in inputs[0]]
        return Pending(self.memory, _reduce_scatter(self.memory, total, parts, opts.asyncOp), outputs[0], total)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> Work:
        """Sum this rank's part of ``input`` over the ranks into ``output``."""
        sizes_match = output.numel() * self.size() == input.numel()
        if self.memory is None or not sizes_match or not self._suits(opts, [output, input]):
            return self._gloo._reduce_scatter_base(output, input, opts)
        return self.reduce_scatter([output], [list(_flat(input).tensor_split(self.size()))], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = _ALL_GATHER) -> Work:
        """Gather ``input`` of every rank, one after the other, in ``output``."""
        sizes_match = output.numel() == input.numel() * self.size()
        if self.memory is None or not sizes_match or not self._suits(opts, [output, input]):
            return self._gloo._allgather_base(output, input, opts)
        full, own = _flat(output), _flat(input)
        return Pending(self.memory, _all_gather(self.memory, full, own, opts.asyncOp), output, full)

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions
    ) -> Work:
        """``all_gather_single`` of each pair."""
        return _Works([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions
    ) -> Work:
        """``reduce_scatter_single`` of each pair."""
        return _Works([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def _suits(self, opts: Options, tensors: Sequence[Tensor]) -> bool:
        """Whether a collective of these ``tensors`` can go through shared memory; the same on every rank."""
        first, longest = tensors[0], max(x.numel() for x in tensors)
        is_sum = getattr(opts, "reduceOp", ReduceOp.SUM) == ReduceOp.SUM
        is_plain = all(x.dtype == first.dtype and x.layout == torch.strided and x.is_cpu for x in tensors)
        fits = not opts.asyncOp or longest * self.size() * first.element_size() <= SLOT
        return is_sum and is_plain and fits and first.dtype in _TYPES


def _flat(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1)


def _all_reduce(memory: GroupMemory, x: Tensor, is_async: bool) -> Messages:
    """Every rank sums the messages of all. Of more than two it sums a share, and then collects those of the others."""
    rank, size = memory.rank, memory.size
    for part in x.split(_elements(x, is_async)):
        slots = memory.next_slots(x.dtype, len(part))
        slots[rank].copy_(part)
        yield
        if size == 2 or is_async:
            torch.add(slots[0], slots[1], out=part)
            for slot in slots[2:]:
                part.add_(slot)
            continue
        shares = [slot.tensor_split(size) for slot in slots]
        for other in memory.others:
            shares[rank][rank].add_(shares[other][rank])
        yield
        for of_rank, share in enumerate(part.tensor_split(size)):
            share.copy_(shares[of_rank][of_rank])


def _reduce_scatter(memory: GroupMemory, total: Tensor, parts: Sequence[Tensor], is_async: bool) -> Messages:
    """A message has a piece for each other rank. ``total`` may lie within this rank's part."""
    step = max(1, _elements(total, is_async) // memory.size)
    for begin in range(0, max(len(part) for part in parts), step):
        pieces = [part[begin : begin + step] for part in parts]
        slots = [slot.split(step) for slot in memory.next_slots(total.dtype, step * memory.size)]
        for other in memory.others:
            slots[memory.rank][other][: len(pieces[other])].copy_(pieces[other])
        yield
        summed, own = pieces[memory.rank], total[begin : begin + step]
        for other in memory.others:
            summed = torch.add(summed, slots[other][memory.rank][: len(own)], out=own)


def _all_gather(memory: GroupMemory, full: Tensor, own: Tensor, is_async: bool) -> Messages:
    """A message is this rank's part. ``own`` may lie within ``full``."""
    parts, step = full.tensor_split(memory.size), _elements(own, is_async)
    for begin in range(0, len(own), step):
        part = own[begin : begin + step]
        slots = memory.next_slots(own.dtype, len(part))
        slots[memory.rank].copy_(part)
        yield
        for other in memory.others:
            parts[other][begin : begin + step].copy_(slots[other])
    if parts[memory.rank].data_ptr() != own.data_ptr():
        parts[memory.rank].copy_(own)


def _elements(x: Tensor, is_async: bool) -> int:
    """Elements of a message: an asynchronous collective is a single one, as it sends no other before ``wait()``."""
    return (SLOT if is_async else _PART) // x.element_size()


class Pending(Work):
    """A collective whose first message has been published."""

    def __init__(self, memory: GroupMemory, messages: Messages, target: Tensor, flat: Tensor) -> None:
        super().__init__()
        if memory.is_broken:
            raise RuntimeError("an earlier collective of this group has failed on this rank")
        if memory.pending is not None:  # the messages of the last collective may not have been read
            memory.pending.wait()  # which gloo would not do
        self.is_done = False
        self._memory, self._messages, self._target, self._flat = memory, messages, target, flat
        memory.pending = self
        self._send()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Take part until the result is there.

        Raises RuntimeError, with gloo's words, if another rank has ended or does not come within the group's timeout.
        """
        while not self.is_done:
            self._memory.await_others()
            self._send()
        return True

    def is_completed(self) -> bool:
        """Whether the result is there; takes part as far as it can without waiting."""
        while not self.is_done and self._memory.all_have_published():
            self._memory.await_others()
            self._send()
        return self.is_done

    def _send(self) -> None:
        """Read the messages of the others, if all have published, and publish the next one, if there is any."""
        try:
            for _ in self._messages:
                return self._memory.publish()
        except BaseException:
            self._memory.is_broken = True  # the other ranks will wait for what was not published
            raise
        self.is_done, self._memory.pending = True, None
        if self._target.data_ptr() != self._flat.data_ptr():
            self._target.detach().copy_(self._flat.view(self._target.shape))
        return None


class _Works(Work):
    """Several collectives under way."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        return all([work.wait() for work in self._works])
