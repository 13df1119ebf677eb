"""The memory that the ranks of a group share, and how they wait for each other's messages in it.

Each rank counts its messages. It writes one into one of its two slots, in turn, then publishes its number; the others
read it once they see the number. Two slots suffice: before a rank writes message n+1 it has read message n of all
others, so all have finished reading its message n-1, whose slot it now reuses.

The memory has no name that a killed rank could leave behind: it ends with the last process that has mapped it.
"""

import ctypes
import mmap
import os
import platform
import select
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Store, Work

from megatron.common.environment import ranks_on_host
from megatron.common.processes import pid_namespace

NAME = "shared_memory"
"""Of the backend, as ``torch.distributed.new_group(backend=NAME)`` takes it."""
SWITCH = "MEGATRON_SHARED_MEMORY"
"""Environment variable: 0 leaves every collective to gloo."""
SLOT = 2**26
"""Bytes of a slot, and so of the longest message. Memory is used only where written."""

_LINE = 64
"""Bytes of a cache line: a rank's counter and the sizes of its last two messages have one of their own."""
SPIN_SECONDS = 1e-3
"""How long a rank that waits keeps looking before it sleeps. It does not give way meanwhile: on a busy machine others
would keep the core far longer, while one that sleeps is among the first to run when it is woken."""
_LOOK_SECONDS = 0.2
"""How often a sleeping rank looks whether the others still run."""


class GroupMemory:
    """The mapped memory of a group: a line with counter and sizes for each rank, then two slots for each rank."""

    def __init__(self, mapped: mmap.mmap, rank: int, processes: Sequence[int], timeout: timedelta) -> None:
        self.rank, self.size = rank, len(processes)
        self.others = [other for other in range(self.size) if other != rank]
        self._mapped, self._timeout = mapped, timeout.total_seconds()
        self._words = memoryview(mapped)[: _header(self.size)].cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._count = self._uses = 0
        self.pending: Work | None = None
        """The collective that has published a message and not yet read those of the others."""
        self.is_broken = False
        """Whether a collective has failed on this rank, so that the others wait for a message that will not come."""
        crowded = (ranks_on_host(os.environ) or self.size) > (os.cpu_count() or 1)
        self._spin_seconds = 0.0 if crowded else SPIN_SECONDS
        self._files: dict[int, int] = {}
        weakref.finalize(self, _close, self._files)
        for other in self.others:
            self._files[other] = os.pidfd_open(processes[other])

    def next_slots(self, dtype: torch.dtype, elements: int) -> list[Tensor]:
        """Where each rank has the next message, of that many elements."""
        self._uses += 1
        self._bytes = elements * dtype.itemsize
        return [self._slot(dtype, rank, elements) for rank in range(self.size)]

    def _slot(self, dtype: torch.dtype, rank: int, elements: int) -> Tensor:
        """A new tensor for each message: one made in inference mode could not be written outside of it."""
        offset = _header(self.size) + (self._uses % 2 * self.size + rank) * SLOT
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
        """Whether ``other`` has published as many messages as this rank; the counters start again at 0 after 2**32."""
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
        """Index of the word with the counter of a rank; the sizes of its messages follow."""
        return rank * _LINE // 4


def _header(size: int) -> int:
    """Bytes before the slots: whole pages."""
    return -(-size * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _close(files: Mapping[int, int]) -> None:
    for file in files.values():
        os.close(file)


def join_memory(store: Store, rank: int, size: int, timeout: timedelta) -> GroupMemory | None:
    """Map the memory of a group, which its first rank creates. None on every rank if one of them cannot.

    Rank 0 creates a file without a name, which the others open as long as it holds it open.
    """
    if size == 1:
        return None
    is_here = _is_supported(os.environ) and size <= (ranks_on_host(os.environ) or size)
    file = _create_file(_header(size) + 2 * size * SLOT) if rank == 0 and is_here else -1
    try:
        store.set(f"place/{rank}", f"{pid_namespace()};{os.getpid()};{file}" if is_here else "")
        places = [store.get(f"place/{other}").decode().split(";") for other in range(size)] if is_here else []
        memory = _map(places, rank, timeout)
        store.set(f"mapped/{rank}", "no" if memory is None else "yes")
        return memory if all(store.get(f"mapped/{other}") == b"yes" for other in range(size)) else None
    finally:
        if file >= 0:
            os.close(file)


def _is_supported(environ: Mapping[str, str]) -> bool:
    """Linux, on a processor where others see a rank's writes in their order: Python has no other barrier."""
    has_calls = hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
    return environ.get(SWITCH) != "0" and has_calls and platform.machine() == "x86_64"


def _create_file(size: int) -> int:
    """A file without a name of that many bytes; -1 if that is not allowed."""
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


def _map(places: Sequence[Sequence[str]], rank: int, timeout: timedelta) -> GroupMemory | None:
    """The memory that rank 0 has created. ``places`` are namespace, process and file of each rank, if all have one."""
    if not places or any(place[0] != places[0][0] for place in places):
        return None
    processes = [int(process) for _, process, _ in places]
    _, creator, number = places[0]
    try:
        with open(f"/proc/{creator}/fd/{number}", "r+b", buffering=0) as file:
            return GroupMemory(mmap.mmap(file.fileno(), 0), rank, processes, timeout)
    except (OSError, ValueError):
        return None


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_WAIT, _WAKE = 0, 1
_LOOK = ctypes.pointer(_Timespec(0, int(_LOOK_SECONDS * 1e9)))
_SYS_FUTEX = 202  # on x86_64


def _futex(address: int, operation: int, value: int, timeout: object, second: None, third: int) -> int:
    """Sleep while the word at ``address`` is ``value``, or wake that many that do: futex(2). Frees Python's lock."""
    return _syscall(_SYS_FUTEX, address, operation, value, timeout, second, third)


_syscall = ctypes.CDLL(None).syscall
_syscall.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.POINTER(_Timespec), ctypes.c_void_p,
    ctypes.c_uint32,
)  # fmt: skip
_syscall.restype = ctypes.c_long
