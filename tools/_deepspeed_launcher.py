"""DeepSpeed's launcher of the ranks of a host, which lets them save; started by tools/_deepspeed_runner.py.

    python tools/_deepspeed_launcher.py SESSION ARGUMENTS

After a signal DeepSpeed's own kills ranks that have not ended within half a minute, and exits with 1. If it was started
over ssh, it outlives the connection. Here ranks may save for as long as they need, the exit code is theirs, and they
are killed with the connection. SESSION, by which pkill finds this process, is empty without ssh.
"""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import _project_root  # noqa: F401
import psutil

from megatron.common.errors import LaunchError
from megatron.tools.cluster.supervise import PREEMPTED

_GRACE = 30.0
"""Seconds for ranks to end after the first one has ended, as in DeepSpeed's launcher."""
_HANG_UP = getattr(select, "POLLRDHUP", 0)
"""Event of a socket; pipes always report their end."""
_TERMINATED = 128 + signal.SIGTERM


class _Rank(subprocess.Popen):
    """A rank of this host, which DeepSpeed's launcher polls every second."""

    all: list["_Rank"] = []
    received: int | None = None
    """The first signal that this process has received."""
    handler: Callable[[int, Any], Any]
    """DeepSpeed's handler of signals, which removes the file of --save_pid."""

    def __init__(self, *args: Any, **kwargs: Any):
        if _Rank.received:
            sys.exit(_TERMINATED)
        super().__init__(*args, **kwargs)
        self.all.append(self)

    def poll(self) -> int | None:
        if _Rank.received:
            end_ranks()
            with suppress(SystemExit):
                _Rank.handler(_Rank.received, None)
            sys.exit(code_after_signal([rank.returncode for rank in self.all]))
        if super().poll():
            end_ranks()  # otherwise DeepSpeed waits half a minute for each one that is stopped
        return self.returncode

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, as by SIGSTOP, so that it cannot receive SIGTERM."""
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def send(self, number: int) -> None:
        """Send a signal to this rank; to all that it has started, too, if that is no program of Python's, or killed."""
        everything = number == signal.SIGKILL or sys.executable not in self.args
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            for one in [*(process.children(recursive=True) if everything else ()), process]:
                with suppress(psutil.Error):
                    one.send_signal(number)


def end_ranks() -> None:
    """Send SIGTERM to all ranks, and wait for them.

    When the first one has ended, those that are stopped are killed, and those that are left ``_GRACE`` seconds later.
    """
    left = _running()
    for rank in left:
        rank.send(signal.SIGTERM)
    deadline = None
    while left:
        time.sleep(0.1)
        left = _running()
        if deadline is None and len(left) < len(_Rank.all):
            deadline = time.monotonic() + _GRACE
        for rank in left if deadline is not None else ():
            if time.monotonic() > deadline or rank.is_stopped:
                rank.send(signal.SIGKILL)


def _running() -> list[_Rank]:
    return [rank for rank in _Rank.all if subprocess.Popen.poll(rank) is None]


def code_after_signal(codes: Collection[int]) -> int:
    """The exit code for ranks that have ended with ``codes`` after SIGTERM: that of a failed one, else 75 or 143.

    A rank that has just begun is ended by the signal itself, as -15.
    """
    known = {0, PREEMPTED, _TERMINATED, -signal.SIGTERM}
    if failed := {code if code > 0 else LaunchError.exit_code for code in codes if code not in known}:
        return min(failed)
    return PREEMPTED if PREEMPTED in codes else _TERMINATED if any(codes) else 0


def end_with_connection() -> None:
    """Kill the ranks when the ssh connection ends that has started this process, as the launcher is gone, or lost."""
    connection = select.poll()
    connection.register(0, _HANG_UP)
    if connection.poll(0):  # ssh -n
        return
    connection.poll()
    for rank in _Rank.all:
        rank.send(signal.SIGKILL)
    os._exit(LaunchError.exit_code)


def main() -> None:
    """Start the ranks and wait for them; exit with their code."""
    session = sys.argv.pop(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _note)
    if session:
        threading.Thread(target=end_with_connection, name="connection", daemon=True).start()

    from deepspeed.launcher import launch

    def keep(_: int, handler: Callable[[int, Any], Any]) -> None:
        _Rank.handler = staticmethod(handler)

    launch.subprocess = SimpleNamespace(Popen=_Rank)
    launch.signal = SimpleNamespace(SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, signal=keep)
    launch.main()


def _note(number: int, _: object) -> None:
    _Rank.received = _Rank.received or number


if __name__ == "__main__":
    main()
