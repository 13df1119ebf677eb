"""Who started this process, and leaving with it: no rank goes on where nobody would notice its end."""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from megatron.config.errors import LaunchError

_PR_SET_PDEATHSIG = 1
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""What torchrun, deepspeed and the kinds of mpirun tell their processes, and a shell does not."""


def die_with_parent() -> None:
    """Where the kernel offers it (Linux), end this process with the one that started it, however that dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_with_launcher(environ: Mapping[str, str]) -> None:
    """Tie this process to the launcher that started it, if one did; a shell may end before what it started.

    A launcher that is killed would leave its ranks training, with nobody to stop them.
    """
    if not any(name in environ for name in _LAUNCHERS):
        return
    die_with_parent()
    # deepspeed starts a process for each host, and that one the ranks.
    runner = _parent(os.getppid())
    if "CROSS_RANK" in environ and runner is not None and _is_deepspeed(runner):
        threading.Thread(target=_leave_behind, args=(runner,), name="launcher", daemon=True).start()


def _parent(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it is gone, or this is no Linux
        return None


def _is_deepspeed(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(word in (b"deepspeed.launcher.runner", b"deepspeed") or word.endswith(b"/deepspeed") for word in words)


def _leave_behind(process: int) -> None:
    """Wait for the end of ``process``, and make an end of this one."""
    try:
        select.select([os.pidfd_open(process)], [], [])
    except ProcessLookupError:
        pass  # it is gone already
    os._exit(LaunchError.exit_code)


EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take the machine away."""


class ExitSignal:
    """The first of ``EXIT_SIGNALS`` that reached this process, from the moment this is made on."""

    def __init__(self) -> None:
        self.number = 0
        for number in EXIT_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number


def ignore_exit_signals() -> None:
    """For helper processes, which end with the process they help."""
    for number in EXIT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_with_parent(parent: int | None = None) -> None:
    """Tie this process to the one that started it, whose number is ``parent``: it may be dead already.

    Ctrl-C reaches every process of a terminal; the parent alone answers it. And the process ends with its parent
    however that dies: it would otherwise wait for work for ever and hold open the parent's locks and connections.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if parent is not None and os.getppid() != parent:
        os._exit(1)
