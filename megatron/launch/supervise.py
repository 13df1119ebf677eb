"""Run a launcher so that its end is the end of all it started, with an exit code that tells what happened.

deepspeed's answers 0 where its helper on this host was killed, and launchers that are killed themselves leave
processes behind. So every process of the run, however deep and in whatever session, is inherited from a launcher that
dies and ended; and each rank of this host leaves a note of its own end, which has to be there.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from megatron.errors import LaunchError
from megatron.launch.parent import die_with_parent
from megatron.launch.rank import NOTES, say

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 5.0
"""Seconds between asking what is left behind to go and ending it."""


def supervise(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run ``command``, a launcher and its arguments, to its end, and end whatever it left.

    Signals that reach this process go on to the launcher: all of ``FORWARDED``.

    Returns the launcher's exit code, 128 + n where signal n ended it, and 6 where it claims success though a rank of
    this host never ended well.
    Raises FileNotFoundError or PermissionError where there is no such launcher.
    """
    _inherit_orphans()
    with tempfile.TemporaryDirectory(prefix="ranks-") as notes:
        launcher = subprocess.Popen(
            list(command), env={**environ, NOTES: notes}, start_new_session=True, preexec_fn=die_with_parent
        )
        earlier = {number: signal.signal(number, _forward_to(launcher)) for number in FORWARDED}
        try:
            code = launcher.wait()
        finally:
            _end_descendants()
            for number, handler in earlier.items():
                signal.signal(number, handler)
        unfinished = [note.name for note in sorted(Path(notes).iterdir()) if note.read_text() == ""]
    if code < 0:
        return 128 - code
    if code == 0 and unfinished:
        say(f"the launcher says that all is well, but {', '.join(unfinished)} of this host were ended from outside")
        return LaunchError.exit_code
    return code


def _inherit_orphans() -> None:
    """Become the parent of every process of the run whose parent dies, in place of the system's first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _forward_to(launcher: subprocess.Popen):
    return lambda number, _: launcher.send_signal(number)


def _end_descendants() -> None:
    """Ask every process below this one to go, and end those that have not gone in time."""
    deadline = time.monotonic() + _GRACE
    left = psutil.Process().children(recursive=True)
    for process in left:
        _signal(process, signal.SIGTERM)
    psutil.wait_procs(left, timeout=max(deadline - time.monotonic(), 0))
    # Those that were stopped, or have begun others meanwhile.
    for process in psutil.Process().children(recursive=True):
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(left, timeout=1)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        pass
