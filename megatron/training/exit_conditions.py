"""Conditions that end training early: signals, the time limit, ``--exit-interval``. No torch here."""

import signal
import time
from typing import NoReturn

from megatron.common.processes import ExitSignal
from megatron.config import RunConfig
from megatron.launch.rank import exit_now

PREEMPTED = 75
"""Exit code (EX_TEMPFAIL) of a run that a signal ended after it saved a checkpoint: start it again."""


class ExitConditions:
    """Checks signals, the time limit and ``--exit-interval``. Its constructor installs handlers and starts the clock.

    Before ``defer_signals()`` a signal ends the process at once, since there is nothing to save.
    """

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._start = time.monotonic()
        self.exit_code = 0
        """Exit code of the process, set by ``requested``."""
        self._signal = ExitSignal(self._exit_at_start)

    def defer_signals(self) -> None:
        """From now on, a signal ends the run only after the current iteration."""
        self._signal.defer()

    def _exit_at_start(self, number: int) -> NoReturn:
        name = signal.Signals(number).name
        exit_now(f"received {name} before the first iteration; nothing was saved", self._exit_code(number))

    def _exit_code(self, number: int) -> int:
        return PREEMPTED if self._run.checkpoint.save else 128 + number

    def local_request(self) -> tuple[int, bool]:
        """The signal that this rank has received (0 for none), and whether its time limit has passed."""
        minutes = self._run.train.exit_duration_in_mins
        return self._signal.number, minutes is not None and time.monotonic() - self._start >= 60 * minutes

    def due(self, iteration: int, signal_number: float, is_late: float) -> str | None:
        """The reason to exit after ``iteration``, or None. Give it the maximum of all ranks' requests."""
        if (reason := self.requested(signal_number, is_late)) is not None:
            return reason
        interval = self._run.train.exit_interval
        return f"--exit-interval {interval}" if due(iteration, interval) else None

    def requested(self, signal_number: float, is_late: float) -> str | None:
        """The reason to exit at once, or None. Give it the maximum of all ranks' requests."""
        train, number = self._run.train, int(signal_number)
        if number:
            self.exit_code = self._exit_code(number)
            return f"received {signal.Signals(number).name}"
        if is_late:
            return f"--exit-duration-in-mins {train.exit_duration_in_mins} have passed"
        return None


def due(iteration: int, interval: int | None) -> bool:
    """Whether an action with the given ``interval`` in iterations is due after ``iteration``; never without one."""
    return bool(interval and iteration % interval == 0)
