"""Progress of this rank: set by the training loop, read by the hang watchdog and the rank failure monitor.

torch's flight recorder keeps the last collectives of a rank (TORCH_FR_BUFFER_SIZE, 2000). torch writes it, for
``torchfrtrace``, after NCCL's timeout; the hang watchdog writes it earlier.
"""

import gc
import linecache
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.common.files import replace_file
from megatron.parallel.pipeline.schedule import Instruction

_COLLECTIVES = Path(dist.distributed_c10d.__file__).name
_PACKAGES = (Path(deepspeed.__file__).parent, Path(__file__).parents[1])
"""Packages whose ``wait()`` calls wait for transfers or asynchronous collectives."""
SNAPSHOT_THREAD = "snapshot"
"""Name prefix of snapshot threads, which may wait for other ranks during training."""
_POINT_TO_POINT = {"send": ("dst", "to"), "isend": ("dst", "to"), "recv": ("src", "from"), "irecv": ("src", "from")}

RECORDER = "flight-recorder-rank"
"""File name prefix of torch's flight recorder; the rank follows."""
_RECORDER_PATH = "TORCH_FR_DUMP_TEMP_FILE"


class Position(NamedTuple):
    """The current position of a rank in the run."""

    text: str
    in_collective: bool
    """Whether it waits in a collective, or for a device that may be running one, and so for other ranks."""


class ProgressState:
    """The current iteration, phase, start of the phase, and pipeline instruction of this rank."""

    def __init__(self) -> None:
        self.iteration, self.phase, self.since = 0, "", time.monotonic()
        self.phases_entered = 0
        """Number of phases so far; equal numbers on two ranks are the same phase of the run."""
        self._instruction = ""

    def enter(self, phase: str, iteration: int) -> None:
        """Start ``phase``, such as "training", of ``iteration``. The empty phase has no time limit."""
        self._instruction = ""
        self.iteration, self.phase, self.since = iteration, phase, time.monotonic()
        self.phases_entered += 1

    def instruct(self, instruction: Instruction) -> AbstractContextManager:
        """Start a pipeline instruction, which lasts until the next one."""
        self._instruction = str(instruction)
        return nullcontext()

    @property
    def seconds(self) -> float:
        """Duration of the current phase; 0 if it has no time limit."""
        return time.monotonic() - self.since if self.phase else 0.0

    def position(self, groups: dict[tuple[int, ...], str]) -> Position:
        """The current position of this rank. ``groups`` maps ranks of process groups to names."""
        frames = sys._current_frames()
        main = threading.main_thread().ident
        assert main is not None, "the main thread runs"
        snapshots = {thread.ident for thread in threading.enumerate() if thread.name.startswith(SNAPSHOT_THREAD)}
        # On a GPU the backward pass and its collectives run in a thread of autograd.
        threads = [frames.pop(main), *(frame for ident, frame in frames.items() if ident not in snapshots)]
        collective = next((text for frame in threads if (text := _collective(frame, groups))), None)
        waits = collective is None and _synchronizes(threads[0])
        call = collective or ("waiting for the device " if waits else "") + _line(threads[0])
        parts = [f"{self.phase or 'outside of training'}, iteration {self.iteration}", self._instruction, call]
        return Position(", ".join(part for part in parts if part), collective is not None or waits)


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread by its identifier.

    No garbage is collected meanwhile: Python 3.11.7 then deadlocks in the end of a ``threading.local``.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


_SYNCHRONIZES = re.compile(r"\.(item|tolist|cpu|numpy|synchronize|nonzero|is_nonzero)\(|\b(float|int|bool)\(|\.to\(")
"""Calls that wait until a device has computed a result; all other calls are asynchronous."""


def _synchronizes(innermost: FrameType) -> bool:
    """Whether a thread may be waiting for its device in a C++ function, which has no Python frame.

    On a GPU collectives are asynchronous: a rank whose collective waits for other ranks stops where it next reads a
    result. On the CPU they are not.
    """
    if get_accelerator().device_name() == "cpu":
        return False
    line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
    return _SYNCHRONIZES.search(line) is not None


def _collective(innermost: FrameType, groups: dict[tuple[int, ...], str]) -> str | None:
    """Description of the collective that a thread is in, with its ranks; None if it is in none."""
    stack = list(traceback.walk_stack(innermost))
    for frame, _ in stack:
        if Path(frame.f_code.co_filename).name == _COLLECTIVES:
            return f"in {frame.f_code.co_name} {_ranks(frame.f_code.co_name, frame.f_locals, groups)}"
    # A process group that is implemented in Python waits in a method of its ``Work``.
    waiting = [number for number, (frame, _) in enumerate(stack) if isinstance(frame.f_locals.get("self"), dist.Work)]
    caller, line = stack[waiting[-1] + 1 if waiting else 0]
    file = Path(caller.f_code.co_filename)
    starts = any(map(file.is_relative_to, _PACKAGES))
    waits = starts and ".wait(" in linecache.getline(str(file), line)
    return f"in wait, {_line(caller)}" if waits else None


def _ranks(name: str, arguments: dict[str, Any], groups: dict[tuple[int, ...], str]) -> str:
    """Description of the ranks of a call of the collective ``name`` with ``arguments``."""
    if name in _POINT_TO_POINT:
        argument, preposition = _POINT_TO_POINT[name]
        return f"{preposition} rank {arguments.get(argument)}"
    group = arguments.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return "over all ranks"
    ranks = tuple(dist.get_process_group_ranks(group))
    return f"over {groups.get(ranks, 'a group of')} ranks {', '.join(map(str, ranks))}"


def _line(frame: FrameType) -> str:
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def record_into(environ: MutableMapping[str, str], folder: Path) -> None:
    """Make torch write its flight recorder into ``folder``, unless the user has set another path.

    Must be called before process groups are created.
    """
    environ.setdefault(_RECORDER_PATH, str(folder / RECORDER))


def recorded_file(environ: Mapping[str, str], rank: int) -> Path | None:
    """The flight recorder file of ``rank``; None if it does not exist."""
    file = Path(f"{environ.get(_RECORDER_PATH, '')}{rank}")
    return file if _RECORDER_PATH in environ and file.is_file() else None


def write_recorded(environ: Mapping[str, str], rank: int) -> None:
    """Write the last collectives of this rank in torch's format, without waiting for the device or other ranks.

    Raises OSError if the file cannot be written.
    """
    module = torch._C._distributed_c10d
    dump = getattr(module, "_dump_nccl_trace", None) if dist.get_backend() == "nccl" else None
    dump = dump or getattr(module, "_dump_fr_trace", None)
    if dump is not None and _RECORDER_PATH in environ:
        with replace_file(Path(f"{environ[_RECORDER_PATH]}{rank}"), durable=False) as file:
            file.write(dump(includeCollectives=True, includeStackTraces=True, onlyActive=False))
