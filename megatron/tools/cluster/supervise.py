"""Run a launcher so that its end is the end of all it started, with an exit code that tells what happened.

deepspeed's answers 0 where its helper on this host was killed, and over MPICH whatever happens; launchers that are
killed themselves leave processes behind. So every process of the run, however deep and in whatever session, is
inherited from a launcher that dies and ended; and each rank of this host leaves a note of its own end, which has to be
there.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil

from megatron.config.errors import CheckpointError, ConfigError, DataError, LaunchError, NumericsError, ResourceError
from megatron.launch.processes import die_with_parent
from megatron.launch.rank import EXIT_CODE_FOLDER, print_error

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 5.0
"""Seconds between asking what is left behind to go and ending it."""


class End(NamedTuple):
    """How a launcher ended."""

    code: int
    was_asked: bool
    """Whether a signal had asked it to."""


def supervise(command: Sequence[str], environ: Mapping[str, str]) -> End:
    """Run ``command``, a launcher and its arguments, to its end, and end whatever it left.

    Signals that reach this process go on to the launcher: all of ``FORWARDED``.

    The exit code is the launcher's, 128 + n where signal n ended it, and that of a rank where it claims success though
    one of this host failed: 6 for a rank that was ended from outside.
    Raises FileNotFoundError or PermissionError where there is no such launcher.
    """
    _inherit_orphans()
    forwarded: list[int] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as notes:
        launcher = subprocess.Popen(
            list(command), env={**environ, EXIT_CODE_FOLDER: notes}, start_new_session=True, preexec_fn=die_with_parent
        )

        def forward(number: int, _: FrameType | None) -> None:
            forwarded.append(number)
            launcher.send_signal(number)

        earlier = {number: signal.signal(number, forward) for number in FORWARDED}
        try:
            code = launcher.wait()
        finally:
            _end_descendants()
            for number, handler in earlier.items():
                signal.signal(number, handler)
        said = {note.name: note.read_text() for note in sorted(Path(notes).iterdir())}
    code = 128 - code if code < 0 else code or _worst(said)
    return End(code, was_asked=bool(forwarded))


def _worst(said: Mapping[str, str]) -> int:
    """The exit code that the ranks of this host stand for, by what each noted; of a rank without one, 6."""
    codes = {rank: int(code) if code else LaunchError.exit_code for rank, code in said.items()}
    failed = [rank for rank, code in codes.items() if code]
    if not failed:
        return 0
    # Ranks that were lost for want of another say less than that one.
    first = min(failed, key=lambda rank: codes[rank] == LaunchError.exit_code)
    how = f"exited with {said[first]}" if said[first] else "was killed"
    print_error(f"the launcher exited with 0, but {first} of this host {how}")
    return codes[first]


def _inherit_orphans() -> None:
    """Become the parent of every process of the run whose parent dies, in place of the system's first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


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


CRASH_LOOP = 93
"""Exit code of a run that dies at the same place again and again: starting it once more changes nothing."""

_MOST_FAILURES = 3
_LEFT_SAVED = 75
_MISTAKES = (ConfigError, DataError, CheckpointError, NumericsError, ResourceError)
_FINAL = {0, _LEFT_SAVED, *(mistake.exit_code for mistake in _MISTAKES)}
"""Exit codes that a new start would not change, or that ask for it to be made by somebody else."""


def run_with_restarts(start: Callable[[], End], progress: Callable[[], object], most: int) -> int:
    """Call ``start`` until the run ends for good, and where it dies, up to ``most`` times more.

    Args:
        start: runs it to its end.
        progress: how far its checkpoints are; anything that is another thing when there is a newer one.
        most: how often it may be started again.

    Returns the exit code of the last start; or 93, where it has died three times in a row without a new checkpoint.
    """
    fruitless, reached = 0, progress()
    for number in range(most + 1):
        code, was_asked = start()
        if was_asked or code in _FINAL:
            return code
        before, reached = reached, progress()
        fruitless = fruitless + 1 if reached == before else 0
        if fruitless == _MOST_FAILURES:
            print_error(f"crash loop: {fruitless} failures in a row without a new checkpoint; not restarted")
            return CRASH_LOOP
        if number == most:
            return code
        print_error(f"the run failed with exit code {code}: restart {number + 1} of {most} (--max-restarts)")
    raise AssertionError("the last start returns")
