"""When a run exits before its last iteration, and with which exit code."""

import signal
import time
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.launch.processes import ExitSignal

PREEMPTED = 75
"""Exit code of a run that was asked to exit and has saved: EX_TEMPFAIL, start it again."""


class ExitRequest(NamedTuple):
    """What one rank has seen, or the maximum over all ranks."""

    signal_number: float
    """Of the signal that was received; 0 if none was."""
    is_late: float
    """1 if ``--exit-duration-in-mins`` have passed, else 0."""


class Exit(NamedTuple):
    """Why the run exits."""

    reason: str
    exit_code: int


class ExitConditions:
    """Signals, the time limit and ``--exit-interval``. From its construction on, signals are caught and time counts."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._start = time.monotonic()
        self._signal = ExitSignal()

    def local_request(self) -> ExitRequest:
        """What this rank has seen so far."""
        minutes = self._run.train.exit_duration_in_mins
        is_late = minutes is not None and time.monotonic() - self._start >= 60 * minutes
        return ExitRequest(self._signal.number, is_late)

    def due(self, iteration: int, request: ExitRequest) -> Exit | None:
        """Whether to exit after ``iteration``, if ``request`` is the maximum over all ranks; the same on every rank."""
        train, number = self._run.train, int(request.signal_number)
        if number:
            code = PREEMPTED if self._run.checkpoint.save else 128 + number
            return Exit(f"received {signal.Signals(number).name}", code)
        if request.is_late:
            return Exit(f"--exit-duration-in-mins {train.exit_duration_in_mins} have passed", 0)
        if train.exit_interval and iteration % train.exit_interval == 0:
            return Exit(f"--exit-interval {train.exit_interval}", 0)
        return None
