"""When a run leaves before its last iteration, and with which exit code. All ranks agree."""

import signal
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megatron.config import RunConfig
from megatron.launch.processes import ExitSignal

PREEMPTED = 75
"""Exit code of a run that was asked to leave and has saved: EX_TEMPFAIL, start it again."""


class Departure(NamedTuple):
    """Why the run leaves."""

    reason: str
    exit_code: int


class Departures:
    """Knows all reasons to leave. Made at the start of the run, whose time it takes."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._began = time.monotonic()
        self._signal = ExitSignal()

    def due(self, iteration: int) -> Departure | None:
        """Whether to leave behind ``iteration``, the same on every rank. Every rank must call it."""
        train = self._run.train
        number, is_late = self._agree()
        if number:
            code = PREEMPTED if self._run.checkpoint.save else 128 + number
            return Departure(f"{signal.Signals(number).name} asks for it", code)
        if is_late:
            return Departure(f"--exit-duration-in-mins {train.exit_duration_in_mins} are over", 0)
        if train.exit_interval and iteration % train.exit_interval == 0:
            return Departure(f"--exit-interval {train.exit_interval} says so", 0)
        return None

    def _agree(self) -> tuple[int, bool]:
        """A signal that reached any rank, and whether time is over on any."""
        minutes = self._run.train.exit_duration_in_mins
        is_late = minutes is not None and time.monotonic() - self._began >= 60 * minutes
        said = torch.tensor([self._signal.number, is_late], device=get_accelerator().current_device_name())
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        number, late = said.tolist()
        return number, bool(late)
