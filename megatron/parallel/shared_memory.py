"""A torch.distributed backend for CPU processes on one host: gloo, with some collectives through shared memory.

gloo sends through sockets. Here each rank of a group writes into memory that all ranks have mapped, and reads what the
others have written. All-reduce, reduce-scatter and all-gather of a tensor work this way, and are complete when the call
returns. gloo runs all other operations, and groups whose ranks cannot all see each other's processes.

Each rank numbers its messages. It alternates between its two slots: it writes a message, then publishes its number;
the others read the message once they see the number. Two slots suffice: before a rank writes message n+1 it has read
message n of all others, so all have finished reading its message n-1, whose slot it reuses. The memory has no name that
a killed rank could leave behind: it is freed with the last process that has mapped it.
"""

import ctypes
import mmap
import os
import platform
import select
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from megatron.common.environment import ranks_on_host
from megatron.common.processes import pid_namespace

NAME = "shared_memory"
"""Name of the backend for ``torch.distributed.new_group(backend=NAME)``."""
SWITCH = "MEGATRON_SHARED_MEMORY"
"""Environment variable: 0 leaves every collective to gloo."""
SLOT = 2**20
"""Bytes of a slot. Larger tensors are sent in parts, which stay in the cache."""
SPIN_SECONDS = 1e-3
"""How long a waiting rank spins before it sleeps. It does not yield while spinning: on a busy machine others would keep
the core much longer, while a sleeping process is among the first to run when it is woken."""
_LINE = 64
"""Bytes of a cache line. Each rank has one for its message counter and the sizes of its last two messages."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)
"""Tensor dtypes that go through shared memory."""


def backend_of_groups(device: str) -> str | None:
    """The backend for new groups: ``NAME`` for gloo on the CPU; otherwise None, which is that of the default group."""
    if device != "cpu" or dist.get_backend() != "gloo":
        return None
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
    return NAME


_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER = AllreduceOptions(), ReduceScatterOptions(), AllgatherOptions()


def _left_to_gloo(name: str) -> Any:
    """A method of ``SharedMemoryGroup`` that calls gloo's ``name``.

    In torch 2.13, methods that a Python process group does not define run with the GIL held. A gloo thread that holds
    gloo's lock and needs the GIL, to free a tensor, would then deadlock.
    """

    def call(self: "SharedMemoryGroup", *arguments: Any, **options: Any) -> Work:
        return getattr(self._gloo, name)(*arguments, **options)

    return call


class SharedMemoryGroup(ProcessGroup):
    """A gloo process group whose sums and all-gathers go through shared memory if all its ranks are on this host.

    These raise RuntimeError, with gloo's message, if another rank has ended or does not arrive within the timeout.
    """

    broadcast, barrier, send, recv, recv_anysource = map(
        _left_to_gloo, ("broadcast", "barrier", "send", "recv", "recv_anysource")
    )
    reduce, gather, allgather, allreduce_coalesced = map(
        _left_to_gloo, ("reduce", "gather", "allgather", "allreduce_coalesced")
    )
    scatter, alltoall, all_to_all_single = map(_left_to_gloo, ("scatter", "alltoall", "alltoall_base"))

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # with a store, Python's methods would not be called
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._gloo._set_sequence_number_for_group()
        self._set_default_backend(ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self._gloo)
        self.memory = join_memory(store, rank, size, timeout)
        """The mapped memory; None if gloo runs all collectives."""

    def allreduce(self, tensors: list[Tensor], opts: AllreduceOptions = _ALL_REDUCE) -> Work:  # type: ignore[override]
        """Sum ``tensors[0]`` over the ranks, in place; the result is bitwise equal on all ranks."""
        if self.memory is None or len(tensors) > 1 or not _suits(opts, tensors):
            return self._gloo.allreduce(tensors, opts)
        flat, rank = _flat(tensors[0]), self.memory.rank
        for part in flat.split(SLOT // flat.element_size()):
            slots = self.memory.next_slots(flat.dtype, len(part))
            slots[rank].copy_(part)
            self.memory.exchange()
            torch.add(slots[0], slots[1], out=part)
            for slot in slots[2:]:
                part.add_(slot)
        return _done(flat, tensors[0])

    def reduce_scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> Work:
        """Sum ``inputs[0][rank]`` over the ranks into ``outputs[0]``; numbers of elements may differ between ranks."""
        if self.memory is None or len(outputs) > 1 or not _suits(opts, [*outputs, *inputs[0]]):
            return self._gloo.reduce_scatter(outputs, inputs, opts)
        total, parts = _flat(outputs[0]), [_flat(part) for part in inputs[0]]
        rank, others, step = self.memory.rank, self.memory.others, SLOT // total.element_size() // self.size()
        for begin in range(0, max(map(len, parts)), step):
            pieces = [part[begin : begin + step] for part in parts]  # a message has a piece for each other rank
            slots = [slot.split(step) for slot in self.memory.next_slots(total.dtype, step * self.size())]
            for other in others:
                slots[rank][other][: len(pieces[other])].copy_(pieces[other])
            self.memory.exchange()
            summed, output = pieces[rank], total[begin : begin + step]  # the output may alias this rank's part
            for other in others:
                summed = torch.add(summed, slots[other][rank][: len(output)], out=output)
        return _done(total, outputs[0])

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, opts: ReduceScatterOptions = _REDUCE_SCATTER
    ) -> Work:
        """Sum this rank's part of ``input`` over the ranks into ``output``."""
        sizes_match = output.numel() * self.size() == input.numel()
        if self.memory is None or not sizes_match or not _suits(opts, [output, input]):
            return self._gloo._reduce_scatter_base(output, input, opts)
        return self.reduce_scatter([output], [list(_flat(input).tensor_split(self.size()))], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = _ALL_GATHER) -> Work:
        """All-gather ``input`` into ``output``, in the order of ranks."""
        sizes_match = output.numel() == input.numel() * self.size()
        if self.memory is None or not sizes_match or not _suits(opts, [output, input]):
            return self._gloo._allgather_base(output, input, opts)
        full, local = _flat(output), _flat(input)  # the input may alias the output
        parts, step, rank = full.tensor_split(self.size()), SLOT // local.element_size(), self.memory.rank
        for begin in range(0, len(local), step):
            part = local[begin : begin + step]
            slots = self.memory.next_slots(local.dtype, len(part))
            slots[rank].copy_(part)
            self.memory.exchange()
            for other in self.memory.others:
                parts[other][begin : begin + step].copy_(slots[other])
        if parts[rank].data_ptr() != local.data_ptr():
            parts[rank].copy_(local)
        return _done(full, output)

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


class _Works(Work):
    """Collectives that are complete, or that gloo is still running."""

    def __init__(self, works: Sequence[Work] = ()) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all collectives."""
        return all([work.wait() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _suits(opts: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether a collective of ``tensors`` can go through shared memory; the answer is the same on every rank."""
    dtype, is_sum = tensors[0].dtype, getattr(opts, "reduceOp", ReduceOp.SUM) == ReduceOp.SUM
    are_plain = all(x.dtype == dtype and x.layout == torch.strided and x.is_cpu for x in tensors)
    return is_sum and are_plain and dtype in _TYPES


def _flat(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1)


def _done(flat: Tensor, target: Tensor) -> Work:
    if target.data_ptr() != flat.data_ptr():  # the target is not contiguous
        target.detach().copy_(flat.view(target.shape))
    return _Works()


class GroupMemory:
    """The mapped memory of a group: a cache line with counter and sizes per rank, then two slots per rank."""

    def __init__(self, mapped: mmap.mmap, rank: int, processes: Sequence[int], timeout: timedelta) -> None:
        self.rank, self.size = rank, len(processes)
        self.others = [other for other in range(self.size) if other != rank]
        self._mapped, self._timeout = mapped, timeout.total_seconds()
        self._words = memoryview(mapped)[: _header(self.size)].cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._count = 0
        crowded = (ranks_on_host(os.environ) or self.size) > (os.cpu_count() or 1)
        self._spin_seconds = 0.0 if crowded else SPIN_SECONDS
        self._files: dict[int, int] = {}
        weakref.finalize(self, lambda files: [*map(os.close, files.values())], self._files)
        for other in self.others:
            self._files[other] = os.pidfd_open(processes[other])

    def next_slots(self, dtype: torch.dtype, elements: int) -> list[Tensor]:
        """The slots of all ranks for the next message of ``elements``."""
        self._count = (self._count + 1) % 2**32
        self._bytes = elements * dtype.itemsize
        first = _header(self.size) + self._count % 2 * self.size * SLOT
        offsets = (first + rank * SLOT for rank in range(self.size))
        # New tensors for each message: tensors created in inference mode cannot be written outside of it.
        slots = (torch.frombuffer(self._mapped, dtype=dtype, count=max(elements, 1), offset=at) for at in offsets)
        return [slot[:elements] for slot in slots]

    def exchange(self) -> None:
        """Publish this rank's message and wait for the others. Raises RuntimeError if one does not arrive."""
        line, size = _line(self.rank), 1 + self._count % 2
        self._words[line + size] = self._bytes
        self._words[line] = self._count
        _futex(self._address + 4 * line, _WAKE, 2**31 - 1)
        for other in self.others:
            if not self._has_published(other):
                self._await(other)
            if self._words[_line(other) + size] != self._bytes:
                raise RuntimeError(f"ranks {self.rank} and {other} of a group call collectives of different sizes")

    def _has_published(self, other: int) -> bool:
        """Whether ``other`` has published as many messages as this rank; counters wrap around at 2**32."""
        return (self._words[_line(other)] - self._count) % 2**32 < 2**31

    def _await(self, other: int) -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < self._spin_seconds:
            if self._has_published(other):
                return
        while not self._has_published(other):
            previous = (self._count - 1) % 2**32  # the counter of the other rank until it publishes
            _futex(self._address + 4 * _line(other), _WAIT, previous)
            for lost in self.others:  # the rank may itself be waiting for another one that has ended
                if self._has_ended(lost) and not self._has_published(lost):
                    raise RuntimeError(f"Connection closed by peer: rank {lost} of the group has ended")
            if time.perf_counter() - begin > self._timeout:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {other} of the group")

    def _has_ended(self, other: int) -> bool:
        poll = select.poll()  # select() is limited to low file descriptors
        poll.register(self._files[other], select.POLLIN)
        return bool(poll.poll(0))


def _line(rank: int) -> int:
    """Index of the 32-bit word with the counter of a rank; the sizes of its messages follow."""
    return rank * _LINE // 4


def _header(size: int) -> int:
    """Bytes before the slots, rounded up to pages."""
    return -(-size * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def join_memory(store: Store, rank: int, size: int, timeout: timedelta) -> GroupMemory | None:
    """Map the memory of a group, which its first rank creates. None on every rank if a rank cannot map it.

    Rank 0 creates an anonymous file, which the other ranks open while it is open on rank 0.
    """
    if size == 1:
        return None
    # Other architectures may reorder the writes of a rank, and Python has no memory barrier.
    is_supported = platform.machine() == "x86_64" and hasattr(os, "pidfd_open") and os.environ.get(SWITCH) != "0"
    is_here = is_supported and size <= (ranks_on_host(os.environ) or size)
    file = os.memfd_create(NAME) if rank == 0 and is_here else -1
    try:
        if file >= 0:
            os.truncate(file, _header(size) + 2 * size * SLOT)
        store.set(f"place/{rank}", f"{pid_namespace()};{os.getpid()};{file}" if is_here else "")
        places = [store.get(f"place/{other}").decode().split(";") for other in range(size)] if is_here else []
        memory = _map(places, rank, timeout)
        store.set(f"mapped/{rank}", "no" if memory is None else "yes")
        return memory if all(store.get(f"mapped/{other}") == b"yes" for other in range(size)) else None
    finally:
        if file >= 0:
            os.close(file)


def _map(places: Sequence[Sequence[str]], rank: int, timeout: timedelta) -> GroupMemory | None:
    """Map the memory created by rank 0. ``places``: namespace, process and file of each rank; empty if unsupported."""
    if not places or any(place[0] != places[0][0] for place in places):
        return None
    processes = [int(process) for _, process, _ in places]
    _, creator, number = places[0]
    try:
        with open(f"/proc/{creator}/fd/{number}", "r+b", buffering=0) as file:
            return GroupMemory(mmap.mmap(file.fileno(), 0), rank, processes, timeout)
    except (OSError, ValueError):
        return None


_WAIT, _WAKE = 0, 1
_SYS_FUTEX = ctypes.c_long(202)  # on x86_64
_LIVENESS_INTERVAL = (ctypes.c_long * 2)(0, 200_000_000)
"""Interval, (seconds, nanoseconds), at which a sleeping rank checks whether the others still run."""
_libc = ctypes.CDLL(None)


def _futex(address: int, operation: int, value: int) -> None:
    """futex(2): sleep while the word at ``address`` is ``value``, or wake ``value`` sleepers. Releases the GIL."""
    timeout = _LIVENESS_INTERVAL
    _libc.syscall(_SYS_FUTEX, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), timeout, None, 0)
