"""Record what a rank communicates while its program runs, and what uses tensors that are being sent or received."""

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
from megatron.tools.one_rank import replaced
from megatron.tools.one_rank.group import OneRankGroup, Operation
from megatron.training.trainer import Trainer


class _Buffer(NamedTuple):
    """A part of memory that belongs to an operation until something waits for it."""

    storage: StorageWeakRef
    begin: int
    end: int
    is_written: bool
    what: str


class BufferWatch:
    """Calls ``found`` with a line for each use of a buffer that is not waited for.

    Nothing may read or write what an operation writes, and nothing may write what it reads. Freed it may be: torch's
    process groups keep it until then.
    """

    def __init__(self, found: Callable[[str], None], place: Callable[[], str]):
        self._found, self._place = found, place
        self._under_way: dict[Any, list[_Buffer]] = {}
        self._by_storage: dict[int, list[_Buffer]] = {}

    def begin(self, number: Any, what: str, written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Operation ``number`` writes and reads these tensors from now on."""
        if self._under_way:
            self._check([(x, True) for x in written] + [(x, False) for x in read])
        buffers = [_Buffer(StorageWeakRef(x.untyped_storage()), *_extent(x), True, what) for x in written]
        buffers += [_Buffer(StorageWeakRef(x.untyped_storage()), *_extent(x), False, what) for x in read]
        self._under_way[number] = buffers
        for buffer in buffers:
            self._by_storage.setdefault(buffer.storage.cdata, []).append(buffer)

    def end(self, number: Any) -> None:
        """Something waits for operation ``number``."""
        buffers = self._under_way.pop(number, [])
        for buffer in buffers:
            if not (same := self._by_storage[buffer.storage.cdata])[1:]:
                del self._by_storage[buffer.storage.cdata]
            else:
                same.remove(buffer)

    def finish(self) -> None:
        """The run has ended."""
        for buffers in self._under_way.values():
            if buffers:
                self._found(f"nothing waits for {buffers[0].what}")

    def computed(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Torch's operation ``func``, which makes no view, begins."""
        if self._under_way:
            self._check(_uses(func, args, kwargs))

    def _check(self, uses: Iterable[tuple[Tensor, bool]]) -> None:
        """``uses`` are tensors, and whether each is written."""
        for x, writes in uses:
            for buffer in self._by_storage.get(x.untyped_storage()._cdata, ()):
                begin, end = _extent(x)
                overlaps = begin < buffer.end and buffer.begin < end
                if overlaps and (writes or buffer.is_written) and not buffer.storage.expired():
                    use = "writes to" if writes else "reads"
                    direction = "receives" if buffer.is_written else "sends"
                    self._found(f"{self._place()} {use} what {buffer.what} {direction}, before a wait")


def _extent(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after the last."""
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
    return [(one.name, one.alias_info is not None and one.alias_info.is_write) for one in arguments]


_ROOT = Path(__file__).resolve().parents[3]
_PACKAGES = Path(torch.__file__).parents[1]
_DEEPSPEED = Path(deepspeed.__file__).parent
_UNNAMED = (
    Path(torch.__file__).parent, _DEEPSPEED / "comm", _DEEPSPEED / "utils", _ROOT / "megatron/tools/one_rank",
    Path(__file__).parent, Path(typing_extensions.__file__),
)  # fmt: skip
"""Where lines do not say what communicates: torch, wrappers, this tool. Nor do those of Python's library."""
_LIBRARY = Path(threading.__file__).parent
_SIZED_BY_OUTPUT = ("reduce_scatter", "recv", "scatter")
START, END = "start", "end"


class Recorder:
    """Writes a ``Trace``; an ``Observer`` of ``one_rank``. ``signal_in`` is the iteration in which SIGTERM arrives."""

    def __init__(self, rank: int, signal_in: int | None = None):
        self.signal_in = signal_in
        self.trace = Trace(rank, threads={"main": []})
        self.phase = START
        self._known: dict[Any, Any] = {}
        self._batch: list[Call] | None = None
        self._own: dict[str, int] = {}
        self._main = threading.get_ident()
        self.buffers = BufferWatch(self._fault, place)

    def _fault(self, text: str) -> None:
        if text not in self.trace.faults:
            self.trace.faults.append(text)

    def grouped(self, parts: Sequence[tuple[int, ...]], group: OneRankGroup | None) -> None:
        """Groups are made in one step, for which all ranks wait where a communicator is split."""
        number = len(self.trace.groups)
        self.trace.groups += parts
        if group is not None:
            self._own[group.registered_name] = len(self._own) + 1
        more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        made = f"number {number + 1}, ranks {_shortened(parts[0])}{more}"
        call = Call("new_group", 0, 0, "", 0, -1, made, self.phase, place())
        self._events().append(Issue((self._once(call),), True))

    def issued(self, operation: Operation) -> tuple[list, Any]:
        """A call; the result is the event that it became."""
        group, kind, events = operation.group, operation.kind, self._events()
        sized = operation.written if kind in _SIZED_BY_OUTPUT else operation.read or operation.written
        elements = sum(x.numel() for x in sized)
        peer = -1 if operation.peer is None else operation.peer
        if kind in TRANSFERS:
            peer = (peer - group.rank()) % group.size()
        has_splits = kind == "all_to_all" and operation.detail
        call = self._once(
            Call(
                kind,
                self._own.get(group.registered_name, 0),
                0 if has_splits else elements,
                str(sized[0].dtype).removeprefix("torch.") if sized else "",
                elements * sized[0].element_size() if sized else 0,
                peer,
                "" if has_splits else operation.detail,
                self.phase,
                place(),
            )
        )
        number = len(events)  # of the call, or of the batch, which follows
        if self._batch is not None:
            self._batch.append(call)
        else:
            events.append(self._once(Issue((call,), False)))
        if threading.get_ident() == self._main:
            key = number if self._batch is None else (number, len(self._batch))
            self.buffers.begin(key, str(call), operation.written, operation.read)
            return events, key
        return events, number

    def waited(self, issued: tuple[list, Any]) -> None:
        """The work of a call is waited for."""
        events, key = issued
        number = key[0] if isinstance(key, tuple) else key
        if threading.get_ident() == self._main:
            self.buffers.end(key)
        if number == len(events) - 1 and _waits_within(sys._getframe(3)) and len(events[number].calls) == 1:
            events[number] = self._once(events[number]._replace(blocks=True))
        elif not events[number].blocks:
            events.append(Wait(number, place()))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """While inside, transfers begin together."""
        self._batch = []
        try:
            yield
        finally:
            calls, self._batch = tuple(self._batch), None
            if calls:
                self._events().append(self._once(Issue(calls, False)))

    def _events(self) -> list:
        name = "main" if threading.get_ident() == self._main else threading.current_thread().name
        return self.trace.threads.setdefault(name, [])

    def _once(self, value: Any) -> Any:
        return self._known.setdefault(value, value)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While inside, the operations of ``one_rank`` are recorded, with the phase of the run that each is in."""
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

    with replaced(
        (ProgressState, "enter", entered),
        (Trainer, "train", trained),
        (Checkpointer, "state", property(_state_when_written)),
        (dist, "batch_isend_irecv", batched),
        (dist.distributed_c10d, "batch_isend_irecv", batched),
        (OneRankGroup, "observer", recorder),
        (tracker, "check_layout", lambda *_: None),
        (load, "check_identity", lambda *_: None),  # of files that stand for those of ranks that are not run
    ):
        yield
        recorder.buffers.finish()


def _state_when_written(checkpointer: Any) -> int:
    """``Checkpointer.state`` after the writer has ended: when it does would differ from rank to rank."""
    if checkpointer._in_flight is not None:
        wait([checkpointer._in_flight.written])
    return _STATE.fget(checkpointer)


_STATE: Any = Checkpointer.state


def _waits_within(frame: FrameType | None) -> bool:
    """Whether it is the function of torch.distributed that has called the operation that waits for it."""
    return frame is not None and frame.f_code.co_filename.endswith(("distributed_c10d.py", "one_rank/run.py"))


def _shortened(ranks: Sequence[int]) -> str:
    if len(ranks) <= 8:
        return str(list(ranks))
    return f"[{ranks[0]}, {ranks[1]}, .., {ranks[-1]}] ({len(ranks)}, {hash(tuple(ranks)) & 0xFFFF:04x})"


_places: dict[tuple[CodeType, int], str] = {}


def place() -> str:
    """``FILE:LINE FUNCTION`` of the innermost frame that says what communicates."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_named(code.co_filename):
            key = code, frame.f_lineno
            if key not in _places:
                file = code.co_filename.removeprefix(f"{_PACKAGES}/").removeprefix(f"{_ROOT}/")
                _places[key] = f"{file}:{frame.f_lineno} {code.co_name}"
            return _places[key]
        frame = frame.f_back
    return "?"


@cache
def _is_named(name: str) -> bool:
    file = Path(name)
    is_library = file.is_relative_to(_LIBRARY) and not file.is_relative_to(_PACKAGES)
    return not (name.startswith("<") or is_library or any(map(file.is_relative_to, _UNNAMED)))
