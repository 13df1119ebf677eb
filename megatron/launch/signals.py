"""Being asked to leave: the first signal is remembered until the iteration is finished, a second one is obeyed."""

import os
import signal
from types import FrameType

LEAVE = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take the machine away."""


class LeaveSignal:
    """The first of ``LEAVE`` that reached this process, from the moment this is made on."""

    def __init__(self) -> None:
        self.number = 0
        for number in LEAVE:
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number


def ignore_leave_signals() -> None:
    """For helper processes, which end with the process they help."""
    for number in LEAVE:
        signal.signal(number, signal.SIG_IGN)
