"""What this rank is doing: said by the training loop, read by the threads that watch it."""

import linecache
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.parallel.pipeline.schedule import Instruction

_COLLECTIVES = Path(dist.distributed_c10d.__file__).name
_BETWEEN_TWO = {"send": ("dst", "to"), "isend": ("dst", "to"), "recv": ("src", "from"), "irecv": ("src", "from")}


class Place(NamedTuple):
    """Where a rank is, in words, and whether it is another rank's turn."""

    text: str
    waits: bool
    """Whether it waits in a collective, and so for others."""


class ProgressState:
    """The iteration and the part of it that this rank is in, since when, and the instruction."""

    def __init__(self) -> None:
        self.iteration, self.phase, self.since = 0, "", time.monotonic()
        self.entered = 0
        """Parts begun so far; the same number is the same part on every rank."""
        self._instruction = ""

    def enter(self, phase: str, iteration: int) -> None:
        """Begin ``phase``, such as "training", of ``iteration``. An empty phase may last as long as it likes."""
        self._instruction = ""
        self.iteration, self.phase, self.since = iteration, phase, time.monotonic()
        self.entered += 1

    def instruct(self, instruction: Instruction) -> AbstractContextManager:
        """Begin an instruction; it lasts until the next."""
        self._instruction = str(instruction)
        return nullcontext()

    @property
    def seconds(self) -> float:
        """How long the present phase has lasted; 0 where it may last."""
        return time.monotonic() - self.since if self.phase else 0.0

    def place(self, groups: dict[tuple[int, ...], str]) -> Place:
        """Where this rank is now. ``groups`` names groups by their ranks."""
        frames = sys._current_frames()
        main = threading.main_thread().ident
        # On a GPU the backward pass, and what it asks of other ranks, runs in a thread of autograd's.
        stacks = [_stack(frames[main])] + [_stack(frame) for thread, frame in frames.items() if thread != main]
        collective = next((words for stack in stacks if (words := _collective(stack, groups))), None)
        doing = collective or _line(stacks[0][0])
        parts = [f"{self.phase or 'outside of training'}, iteration {self.iteration}", self._instruction, doing]
        return Place(", ".join(part for part in parts if part), collective is not None)


def _stack(frame: FrameType | None) -> list[FrameType]:
    """The frames of a thread, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _collective(stack: list[FrameType], groups: dict[tuple[int, ...], str]) -> str | None:
    """The collective that a thread is in, and with whom; None where it is in none."""
    for frame in stack:
        if Path(frame.f_code.co_filename).name == _COLLECTIVES:
            return f"in {frame.f_code.co_name} {_partners(frame.f_code.co_name, frame.f_locals, groups)}"
    innermost = stack[0].f_code.co_filename, stack[0].f_lineno
    if "deepspeed" in innermost[0] and ".wait(" in linecache.getline(*innermost):
        return f"in wait, {_line(stack[0])}"
    return None


def _partners(name: str, given: dict[str, Any], groups: dict[tuple[int, ...], str]) -> str:
    """With whom a call of the collective ``name`` with these arguments is."""
    if name in _BETWEEN_TWO:
        argument, preposition = _BETWEEN_TWO[name]
        return f"{preposition} rank {given.get(argument)}"
    group = given.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return "over all ranks"
    ranks = tuple(dist.get_process_group_ranks(group))
    return f"over {groups.get(ranks, 'a group of')} ranks {', '.join(map(str, ranks))}"


def _line(frame: FrameType) -> str:
    return f"at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
