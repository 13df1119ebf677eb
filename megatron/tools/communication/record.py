"""Records the communication of a rank while its program runs, and races on tensors that are sent or received."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.checkpoint import load, tracker
from megatron.checkpoint.save import Checkpointer
from megatron.launch.progress import ProgressState
from megatron.tools.communication.check import TRANSFERS, Call, Issue, Trace, Wait
from megatron.tools.one_rank import patched
from megatron.tools.one_rank.group import OneRankGroup, Operation
from megatron.training.trainer import Trainer


class _Buffer(NamedTuple):
    """A range of memory that an operation uses until the program waits for it."""

    storage: StorageWeakRef
    begin: int
    end: int
    is_written: bool
    what: str


class BufferWatch:
    """Reports races: uses of a buffer before the program has waited for the operation.

    Until then the buffer that an operation writes must not be read or written, and the buffer that it reads must not be
    written. It may be freed, since torch's process groups keep a reference.

    Args:
        report: called with a line for each race.
        caller: returns the current location in the program.
    """

    def __init__(self, report: Callable[[str], None], caller: Callable[[], str]):
        self._report, self._caller = report, caller
        self._pending: dict[Any, list[_Buffer]] = {}
        self._by_storage: dict[int, list[_Buffer]] = {}

    def begin(self, number: Any, what: str, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Register the tensors that operation ``number`` writes and reads from now on."""
        if self._pending:
            self._check([(x, True) for x in written] + [(x, False) for x in read])
        buffers = [_Buffer(StorageWeakRef(x.untyped_storage()), *_extent(x), True, what) for x in written]
        buffers += [_Buffer(StorageWeakRef(x.untyped_storage()), *_extent(x), False, what) for x in read]
        self._pending[number] = buffers
        for buffer in buffers:
            self._by_storage.setdefault(buffer.storage.cdata, []).append(buffer)

    def end(self, number: Any) -> None:
        """Unregister operation ``number``: the program waits for it."""
        buffers = self._pending.pop(number, [])
        for buffer in buffers:
            if not (same := self._by_storage[buffer.storage.cdata])[1:]:
                del self._by_storage[buffer.storage.cdata]
            else:
                same.remove(buffer)

    def finish(self) -> None:
        """Report operations that the program has not waited for, at the end of the run."""
        for buffers in self._pending.values():
            if buffers:
                self._report(f"nothing waits for {buffers[0].what}")

    def on_operation(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Check the arguments of a torch operation that does not return a view, before it runs."""
        if self._pending:
            self._check(_uses(func, args, kwargs))

    def _check(self, uses: Iterable[tuple[Tensor, bool]]) -> None:
        """Check ``uses``: tensors, and whether each is written."""
        for x, writes in uses:
            for buffer in self._by_storage.get(x.untyped_storage()._cdata, ()):
                begin, end = _extent(x)
                overlaps = begin < buffer.end and buffer.begin < end
                if overlaps and (writes or buffer.is_written) and not buffer.storage.expired():
                    use = "writes to" if writes else "reads"
                    direction = "receives" if buffer.is_written else "sends"
                    self._report(f"{self._caller()} {use} what {buffer.what} {direction}, before a wait")


def _extent(x: Tensor) -> tuple[int, int]:
    """Begin and end of a tensor in its storage, in bytes."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    begin = int(x.storage_offset())
    return begin * x.element_size(), (begin + int(last) + 1) * x.element_size()


def _uses(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[Tensor, bool]]:
    for number, (name, writes) in enumerate(_arguments(func)):
        value = args[number] if number < len(args) else kwargs.get(name)
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, Tensor):
                yield leaf, writes


@cache
def _arguments(func: Any) -> list[tuple[str, bool]]:
    """Names of the arguments, and whether they are written."""
    arguments = func._schema.arguments
    return [(argument.name, bool(argument.alias_info and argument.alias_info.is_write)) for argument in arguments]


_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = Path(torch.__file__).parents[1]
_DEEPSPEED = Path(deepspeed.__file__).parent
_SKIPPED = (
    Path(torch.__file__).parent, _DEEPSPEED / "comm", _DEEPSPEED / "utils", _ROOT / "megatron/tools/one_rank",
    Path(__file__).parent, Path(typing_extensions.__file__),
)  # fmt: skip
"""Files whose frames are skipped in ``caller``: torch, wrappers of collectives, this tool. So is Python's library."""
_LIBRARY = Path(threading.__file__).parent
_SIZED_BY_OUTPUT = ("reduce_scatter", "recv", "scatter")
START, END = "start", "end"


class Recorder:
    """Records a ``Trace``, as an ``Observer`` of ``one_rank``. SIGTERM arrives in iteration ``signal_in``."""

    def __init__(self, rank: int, signal_in: int | None = None):
        self.signal_in = signal_in
        self.trace = Trace(rank, threads={"main": []})
        self.phase = START
        self._interned: dict[Any, Any] = {}
        self._batch: list[Call] | None = None
        self._group_numbers: dict[str, int] = {}
        self._main = threading.get_ident()
        self.buffers = BufferWatch(self._fault, caller)

    def _fault(self, text: str) -> None:
        if text not in self.trace.faults:
            self.trace.faults.append(text)

    def grouped(self, parts: Sequence[tuple[int, ...]], group: OneRankGroup | None) -> None:
        """Record the creation of groups as one collective, since splitting a communicator waits for all its ranks."""
        number = len(self.trace.groups)
        self.trace.groups += parts
        if group is not None:
            self._group_numbers[group.registered_name] = len(self._group_numbers) + 1
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        detail = f"number {number + 1}, ranks {_shortened(parts[0])}{more}"
        call = Call("new_group", 0, 0, "", 0, -1, detail, self.phase, caller())
        self._events().append(Issue((self._intern(call),), True))

    def issued(self, operation: Operation) -> tuple[list, Any]:
        """Record a call. Returns the list of events and the index of the event in it."""
        group, kind, events = operation.group, operation.kind, self._events()
        sized = operation.written if kind in _SIZED_BY_OUTPUT else operation.read or operation.written
        elements = sum(x.numel() for x in sized)
        peer = -1 if operation.peer is None else operation.peer
        if kind in TRANSFERS:
            peer = (peer - group.rank()) % group.size()
        has_splits = kind == "all_to_all" and operation.detail
        call = self._intern(
            Call(
                kind,
                self._group_numbers.get(group.registered_name, 0),
                0 if has_splits else elements,
                str(sized[0].dtype).removeprefix("torch.") if sized else "",
                elements * sized[0].element_size() if sized else 0,
                peer,
                "" if has_splits else operation.detail,
                self.phase,
                caller(),
            )
        )
        number = len(events)  # index of this event, or of the batch, which is appended later
        if self._batch is not None:
            self._batch.append(call)
        else:
            events.append(self._intern(Issue((call,), False)))
        if threading.get_ident() == self._main:
            key = number if self._batch is None else (number, len(self._batch))
            self.buffers.begin(key, str(call), operation.written, operation.read)
            return events, key
        return events, number

    def waited(self, issued: tuple[list, Any]) -> None:
        """Record a wait for a call."""
        events, key = issued
        number = key[0] if isinstance(key, tuple) else key
        if threading.get_ident() == self._main:
            self.buffers.end(key)
        if number == len(events) - 1 and _waits_within(sys._getframe(3)) and len(events[number].calls) == 1:
            events[number] = self._intern(events[number]._replace(blocks=True))
        elif not events[number].blocks:
            events.append(Wait(number, caller()))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context in which transfers are recorded as one batch."""
        self._batch = []
        try:
            yield
        finally:
            calls, self._batch = tuple(self._batch), None
            if calls:
                self._events().append(self._intern(Issue(calls, False)))

    def _events(self) -> list:
        name = "main" if threading.get_ident() == self._main else threading.current_thread().name
        return self.trace.threads.setdefault(name, [])

    def _intern(self, value: Any) -> Any:
        return self._interned.setdefault(value, value)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Context in which ``recorder`` records all collectives and transfers, each with the phase of the run."""
    enter, train, batch = ProgressState.enter, Trainer.train, dist.batch_isend_irecv

    def entered(progress: ProgressState, phase: str, iteration: int) -> None:
        recorder.phase = phase or recorder.phase
        if phase == "training" and iteration == recorder.signal_in:
            os.kill(os.getpid(), signal.SIGTERM)
        enter(progress, phase, iteration)

    def trained(trainer: Trainer, *arguments: Any, **options: Any) -> int:
        code = train(trainer, *arguments, **options)
        recorder.phase = END
        return code

    def batched(*arguments: Any) -> Any:
        with recorder.batch():
            return batch(*arguments)

    with patched(
        (ProgressState, "enter", entered),
        (Trainer, "train", trained),
        (Checkpointer, "state", property(_state_when_written)),
        (dist, "batch_isend_irecv", batched),
        (dist.distributed_c10d, "batch_isend_irecv", batched),
        (OneRankGroup, "observer", recorder),
        (tracker, "check_layout", lambda *_: None),
        (load, "check_identity", lambda *_: None),  # files of representatives stand in for those of other ranks
    ):
        yield
        recorder.buffers.finish()


def _state_when_written(checkpointer: Any) -> int:
    """``Checkpointer.state`` that waits for the writer, so that it does not depend on the writer's speed."""
    if checkpointer._in_flight is not None:
        wait([checkpointer._in_flight.written])
    return _STATE.fget(checkpointer)


_STATE: Any = Checkpointer.state


def _waits_within(frame: FrameType | None) -> bool:
    """Whether the wait at ``frame`` is inside the torch.distributed function that issued the operation."""
    return frame is not None and frame.f_code.co_filename.endswith(("distributed_c10d.py", "one_rank/run.py"))


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, .., {ranks[-1]}] ({len(ranks)}, {hash(tuple(ranks)) & 0xFFFF:04x})"


_locations: dict[tuple[CodeType, int], str] = {}


def caller() -> str:
    """``FILE:LINE FUNCTION`` of the innermost frame that is not skipped: the code that communicates."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not _is_skipped(code.co_filename):
            key = code, frame.f_lineno
            if key not in _locations:
                file = code.co_filename.removeprefix(f"{_PACKAGES}/").removeprefix(f"{_ROOT}/")
                _locations[key] = f"{file}:{frame.f_lineno} {code.co_name}"
            return _locations[key]
        frame = frame.f_back
    return "?"


@cache
def _is_skipped(name: str) -> bool:
    file = Path(name)
    is_library = file.is_relative_to(_LIBRARY) and not file.is_relative_to(_PACKAGES)
    return name.startswith("<") or is_library or any(map(file.is_relative_to, _SKIPPED))
