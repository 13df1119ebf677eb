"""A backend of torch.distributed for processes of one host on the CPU: gloo, with collectives through shared memory.

gloo sends through sockets. Here each rank of a group writes into memory that all of them have mapped, and reads what
the others have written. All-reduce, reduce-scatter and all-gather of a tensor do so; everything else is left to gloo,
as is a group whose ranks do not all see each other's processes.

Each rank counts its messages. It writes one into one of its two slots, in turn, then publishes its number; the others
read it once they see the number. A rank is done with one message, which all others have published by then, before it
writes the next, so that none overwrites what another still reads. An asynchronous collective has published its
message when it returns, and reads those of the others in ``wait()``, or before the next collective of the group.

The memory has no name that a killed rank could leave behind: it ends with the last process that has mapped it.
"""

import ctypes
import mmap
import os
import platform
import select
import socket
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from megatron.config.environment import ranks_on_host

NAME = "shared_memory"
"""Of the backend, as ``torch.distributed.new_group(backend=NAME)`` takes it."""
SWITCH = "MEGATRON_SHARED_MEMORY"
"""Environment variable: 0 leaves every collective to gloo."""

_PART = 2**20
"""Bytes of a message. A larger tensor is sent in parts, which stay in the cache between two cores."""
_SLOT = 2**26
"""Bytes of a slot, and so of an asynchronous collective, which is one message. Memory is used only where written."""
_LINE = 64
"""Bytes of a cache line: a rank's counter and the sizes of its last two messages have one of their own."""
_SPIN_SECONDS = 1e-3
"""How long a rank that waits keeps looking before it sleeps. It does not give way meanwhile: on a busy machine others
would keep the core far longer, while one that sleeps is among the first to run when it is woken."""
_LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the others still run."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64)

Messages = Generator[None, None, None]
"""The steps of a collective: it stops after each message that it has written, and continues once all have published."""


def backend_of_groups(device: str) -> str | None:
    """``NAME`` for groups of gloo on the CPU; None for the backend of the default group."""
    if device != "cpu" or dist.get_backend() != "gloo":
        return None
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SharedMemoryGroup, devices=["cpu"])
    return NAME


_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER = (
    AllreduceOptions(),
    ReduceScatterOptions(),
    AllgatherOptions(),
)
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
        self.memory = _join(store, rank, size, timeout)
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
        is_whole = output.numel() * self.size() == input.numel()
        if self.memory is None or not is_whole or not self._suits(opts, [output, input]):
            return self._gloo._reduce_scatter_base(output, input, opts)
        return self.reduce_scatter([output], [list(_flat(input).tensor_split(self.size()))], opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: AllgatherOptions = _ALL_GATHER) -> Work:
        """Gather ``input`` of every rank, one after the other, in ``output``."""
        is_whole = output.numel() == input.numel() * self.size()
        if self.memory is None or not is_whole or not self._suits(opts, [output, input]):
            return self._gloo._allgather_base(output, input, opts)
        whole, own = _flat(output), _flat(input)
        return Pending(self.memory, _all_gather(self.memory, whole, own, opts.asyncOp), output, whole)

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: AllgatherOptions
    ) -> Work:
        """``all_gather_single`` of each pair."""
        return _Together([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: ReduceScatterOptions
    ) -> Work:
        """``reduce_scatter_single`` of each pair."""
        return _Together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def _suits(self, opts: Options, tensors: Sequence[Tensor]) -> bool:
        """Whether a collective of these ``tensors`` can go through shared memory; the same on every rank."""
        first, longest = tensors[0], max(x.numel() for x in tensors)
        is_sum = getattr(opts, "reduceOp", ReduceOp.SUM) == ReduceOp.SUM
        is_plain = all(x.dtype == first.dtype and x.layout == torch.strided and x.is_cpu for x in tensors)
        fits = not opts.asyncOp or longest * self.size() * first.element_size() <= _SLOT
        return is_sum and is_plain and fits and first.dtype in _TYPES


def _flat(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1)


def _all_reduce(memory: "_Memory", x: Tensor, is_async: bool) -> Messages:
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


def _reduce_scatter(memory: "_Memory", total: Tensor, parts: Sequence[Tensor], is_async: bool) -> Messages:
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


def _all_gather(memory: "_Memory", whole: Tensor, own: Tensor, is_async: bool) -> Messages:
    """``own`` may lie within ``whole``."""
    parts, step = whole.tensor_split(memory.size), _elements(own, is_async)
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
    """Of a message: an asynchronous collective is a single one, because it sends no other before ``wait()``."""
    return (_SLOT if is_async else _PART) // x.element_size()


class Pending(Work):
    """A collective whose first message has been published."""

    def __init__(self, memory: "_Memory", messages: Messages, target: Tensor, flat: Tensor) -> None:
        super().__init__()
        self.is_done = False
        self._memory, self._messages, self._target, self._flat = memory, messages, target, flat
        memory.finish_pending()
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


class _Together(Work):
    """Several collectives under way."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        return all([work.wait() for work in self._works])


class _Memory:
    """The mapped memory of a group: a line with counter and sizes for each rank, then two slots for each rank."""

    def __init__(self, mapped: mmap.mmap, rank: int, processes: Sequence[int], timeout: timedelta) -> None:
        self.rank, self.size = rank, len(processes)
        self.others = [other for other in range(self.size) if other != rank]
        self._mapped, self._timeout = mapped, timeout.total_seconds()
        self._words = memoryview(mapped)[: _header(self.size)].cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._count = self._uses = 0
        self.pending: Pending | None = None
        self.is_broken = False
        crowded = (ranks_on_host(os.environ) or self.size) > (os.cpu_count() or 1)
        self._spin_seconds = 0.0 if crowded else _SPIN_SECONDS
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close, self._files)
        for other in self.others:
            self._files[other] = os.pidfd_open(processes[other])

    def finish_pending(self) -> None:
        """Before another collective begins: the messages of the last one may not have been read.

        It is waited for, which gloo would not do.
        """
        if self.is_broken:
            raise RuntimeError("an earlier collective of this group has failed on this rank")
        if self.pending is not None:
            self.pending.wait()

    def next_slots(self, dtype: torch.dtype, elements: int) -> list[Tensor]:
        """Where each rank has the next message, of so many elements."""
        self._uses += 1
        self._bytes = elements * dtype.itemsize
        return [self._slot(dtype, rank, elements) for rank in range(self.size)]

    def _slot(self, dtype: torch.dtype, rank: int, elements: int) -> Tensor:
        """A new tensor for each message: one made in inference mode could not be written outside of it."""
        offset = _header(self.size) + (self._uses % 2 * self.size + rank) * _SLOT
        return torch.frombuffer(self._mapped, dtype=dtype, count=max(elements, 1), offset=offset)[:elements]

    def publish(self) -> None:
        """Let the others read this rank's message, and wake those that sleep."""
        self._count = (self._count + 1) % 2**32
        line = self._line(self.rank)
        self._words[line + 1 + self._count % 2] = self._bytes
        self._words[line] = self._count
        _futex(self._address + 4 * line, _WAKE, 2**31 - 1, None, None, 0)

    def await_others(self) -> None:
        """Until all have published as many messages as this rank. Raises RuntimeError if one does not."""
        size = 1 + self._count % 2
        for other in self.others:
            if not self._has_published(other):
                self._await(other)
            if self._words[self._line(other) + size] != self._words[self._line(self.rank) + size]:
                raise RuntimeError(f"ranks {self.rank} and {other} of a group call collectives of different sizes")

    def all_have_published(self) -> bool:
        """Whether ``await_others()`` returns at once."""
        return all(map(self._has_published, self.others))

    def _has_published(self, other: int) -> bool:
        return (self._words[self._line(other)] - self._count) % 2**32 < 2**31

    def _await(self, other: int) -> None:
        begin = time.perf_counter()
        while time.perf_counter() - begin < self._spin_seconds:
            if self._has_published(other):
                return
        line = self._line(other)
        while not self._has_published(other):
            seen = (self._count - 1) % 2**32  # of the other, while it has not published
            _futex(self._address + 4 * line, _WAIT, seen, _LOOK, None, 0)
            for lost in self.others:  # the one that is waited for may wait for another that has ended
                if self._has_ended(lost) and not self._has_published(lost):
                    raise RuntimeError(f"Connection closed by peer: rank {lost} of the group has ended")
            if time.perf_counter() - begin > self._timeout:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {other} of the group")

    def _has_ended(self, other: int) -> bool:
        poll = select.poll()  # select() refuses the numbers of many open files
        poll.register(self._files[other], select.POLLIN)
        return bool(poll.poll(0))

    @staticmethod
    def _line(rank: int) -> int:
        return rank * _LINE // 4


def _header(size: int) -> int:
    """Bytes before the slots: whole pages."""
    return -(-size * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _close(files: Mapping[int, int]) -> None:
    for file in files.values():
        os.close(file)


def _join(store: Store, rank: int, size: int, timeout: timedelta) -> _Memory | None:
    """Map the memory of a group, which its first rank creates. None on every rank if one of them cannot.

    Rank 0 creates a file without a name, which the others open as long as it holds it open.
    """
    if size == 1:
        return None
    is_here = _is_supported(os.environ) and size <= (ranks_on_host(os.environ) or size)
    file = _created(_header(size) + 2 * size * _SLOT) if rank == 0 and is_here else -1
    try:
        store.set(f"place/{rank}", f"{pid_namespace()};{os.getpid()};{file}" if is_here else "")
        places = [store.get(f"place/{other}").decode().split(";") for other in range(size)] if is_here else []
        memory = _mapped(places, rank, timeout)
        store.set(f"mapped/{rank}", "no" if memory is None else "yes")
        return memory if all(store.get(f"mapped/{other}") == b"yes" for other in range(size)) else None
    finally:
        if file >= 0:
            os.close(file)


def _is_supported(environ: Mapping[str, str]) -> bool:
    """Linux, on a processor where others see a rank's writes in their order: Python has no other barrier."""
    has_calls = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return environ.get(SWITCH) != "0" and has_calls and platform.machine() == "x86_64"


def _created(size: int) -> int:
    """A file without a name of so many bytes; -1 if that is not allowed."""
    try:
        file = os.memfd_create(NAME)
    except OSError:
        return -1
    try:
        os.ftruncate(file, size)
    except OSError:
        os.close(file)
        return -1
    return file


def _mapped(places: Sequence[Sequence[str]], rank: int, timeout: timedelta) -> _Memory | None:
    if not places or any(place[0] != places[0][0] for place in places):
        return None
    processes = [int(process) for _, process, _ in places]
    _, creator, number = places[0]
    try:
        with open(f"/proc/{creator}/fd/{number}", "r+b", buffering=0) as file:
            return _Memory(mmap.mmap(file.fileno(), 0), rank, processes, timeout)
    except (OSError, ValueError):
        return None


def pid_namespace() -> str:
    """A name of the set of processes that this one can see; the same for ranks that see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_WAIT, _WAKE = 0, 1
_LOOK = ctypes.pointer(_Timespec(0, int(_LOOK_SECONDS * 1e9)))
_SYS_FUTEX = 202  # on x86_64


def _futex(address: int, operation: int, value: int, timeout: object, second: None, third: int) -> int:
    """Sleep while the word at ``address`` is ``value``, or wake so many that do: futex(2). Frees Python's lock."""
    return _syscall(_SYS_FUTEX, address, operation, value, timeout, second, third)


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec), ctypes.c_void_p,
    ctypes.c_uint32,
)  # fmt: skip
_syscall.restype = ctypes.c_long
