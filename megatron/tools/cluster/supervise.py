"""Runs a launcher with a reliable exit code and without leftover processes, and restarts failed runs.

deepspeed exits with 0 if its helper on this host was killed, and always with MPICH; killed launchers leave processes
behind. So this process becomes the parent of all orphans of the run, in any session, and ends them; and each rank
writes its exit code into a file, which is checked.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import psutil

from megatron.common.errors import CheckpointError, ConfigError, DataError, LaunchError, NumericsError, ResourceError
from megatron.common.processes import die_with_parent
from megatron.launch.rank import EXIT_CODE_FOLDER, TRAINED, print_error

HELPER = "MEGATRON_SUPERVISOR_HELPER"
"""Environment variable of child processes that do not belong to the run, and are not ended with it."""
_OF_OTHERS = (HELPER, "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables that a launcher does not inherit. The last two are of a torchrun that has started this program."""
CRASH_LOOP = 93
"""Exit code of a run that fails repeatedly without a new checkpoint, so that restarts do not help."""

MOST_FAILURES = 3
PREEMPTED = 75
"""Exit code of a run that has saved a checkpoint after a signal."""
_MISTAKES = (ConfigError, DataError, CheckpointError, NumericsError, ResourceError)
FINAL = {0, PREEMPTED, *(mistake.exit_code for mistake in _MISTAKES)}
"""Exit codes without a restart: it would not help, or is left to the scheduler."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SSH_FAILED = 255
"""Exit code of ssh without a connection, and so of pdsh."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.2
"""Seconds between two calls of a ``Watch``."""
_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for leftover processes."""


class LauncherExit(NamedTuple):
    """How a launcher ended."""

    code: int
    signals: int
    """Number of signals that were forwarded to the launcher."""
    was_stopped: bool = False
    """Whether the launcher was killed because ``watch`` returned True."""


Watch = Callable[[psutil.Process, bool], bool]
"""Called several times a second with the launcher, and whether a signal was forwarded to it; returns whether to kill
the launcher."""


def supervise(
    command: Sequence[str], environ: Mapping[str, str], watch: Watch | None = None, exit_codes: Path | None = None
) -> LauncherExit:
    """Run ``command``, a launcher and its arguments, to its end, and end leftover processes.

    The signals in ``FORWARDED`` are passed on to the launcher. Each rank writes its exit code into the folder
    ``exit_codes``, by default a temporary folder.

    The exit code is the launcher's, or 128 + n if signal n ended it. If it is 0 although a rank of this host failed,
    the result is the rank's exit code: 6 for a rank that was killed. If all ranks of this host have saved after a
    signal, it is 75; after a second signal n, or one that no rank could report, it is 128 + n.
    Raises FileNotFoundError or PermissionError if the launcher does not exist or is not executable.
    """
    _inherit_orphans()
    forwarded: list[int] = []
    was_stopped = False
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        folder = exit_codes or Path(temporary)
        # No signal is lost between the start of the launcher and the handlers that forward signals to it.
        earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            inherited = {name: value for name, value in environ.items() if name not in _OF_OTHERS}
            launcher = _start(command, {**inherited, EXIT_CODE_FOLDER: str(folder)}, earlier_mask)

            def forward(number: int, _: FrameType | None) -> None:
                forwarded.append(number)
                launcher.send_signal(number)

            earlier = {number: signal.signal(number, forward) for number in FORWARDED}
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)
        try:
            code, was_stopped = _wait(launcher, watch, forwarded)
        finally:
            _end_descendants(0.0 if was_stopped else _GRACE)
            for number, handler in earlier.items():
                signal.signal(number, handler)
        codes, have_all_begun = read_exit_codes(folder), (folder / TRAINED).exists()
    return LauncherExit(_exit_code(code, forwarded, codes, have_all_begun), len(forwarded), was_stopped)


def _exit_code(code: int, forwarded: Sequence[int], codes: Mapping[int, str], have_all_begun: bool) -> int:
    """The exit code for a launcher that ended with ``code`` after the signals ``forwarded``; see ``supervise``.

    ``codes`` are those of the ranks of this host.
    """
    by = _by_signal(code)
    if forwarded and set(codes.values()) == {str(PREEMPTED)}:  # DeepSpeed's launchers exit with another code
        code = PREEMPTED
    elif len(forwarded) > 1 or (forwarded and _ends_by_signal(code, codes)):
        code = 128 + forwarded[-1]
    elif code == _SSH_FAILED and not codes:
        print_error("a connection of ssh, or what it started, has failed; tools/doctor.py looks for the cause")
        code = LaunchError.exit_code
    elif code > 0 and (list(codes.values()) == [""] or (by and not codes)):  # no other rank here could report it
        known = (
            f"rank {next(iter(codes))}{'' if have_all_begun else ', or another that had just begun,'}" if codes else ""
        )
        print_error(f"{known or 'a rank that started'} was killed{by}")
        code = LaunchError.exit_code
    elif by and "" in codes.values():  # another rank of this host has reported it
        code = LaunchError.exit_code
    return 128 - code if code < 0 else code or _code_of_ranks(codes)


def _ends_by_signal(code: int, codes: Mapping[int, str]) -> bool:
    """Whether the signal itself has ended the ranks, which get SIGTERM in its place, or the launcher."""
    has_own = code <= 0 or code in {*FINAL, LaunchError.exit_code} or any(codes.values())
    return code == 128 + signal.SIGTERM or not has_own


def _by_signal(code: int) -> str:
    """The signal that ended a rank, for a message; empty unless DeepSpeed's launcher reports one: by 256 - n."""
    number = 256 - code
    return f" by {signal.Signals(number).name}" if number in list(signal.Signals) and code != _SSH_FAILED else ""


def read_exit_codes(folder: Path) -> dict[int, str]:
    """The exit code that each rank has written into ``folder``, which may be shared; empty for a killed rank."""
    codes = {}
    for file in folder.iterdir():
        if name := re.fullmatch("rank ([0-9]+)", file.name):
            with suppress(OSError):
                codes[int(name[1])] = file.read_text()
    return dict(sorted(codes.items()))


def code_after_signal(folder: Path, code: int, patience: float) -> int:
    """The exit code of all ranks after a signal if it is the same, 75 if they have saved; else ``code``.

    With several hosts DeepSpeed's launcher exits with ``code`` a second after the signal: started ranks get
    ``patience`` seconds to end. If no rank has started, there was nothing to save.
    """
    deadline = time.monotonic() + patience
    while "" in (codes := read_exit_codes(folder)).values() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    left = set(codes.values()) or {str(PREEMPTED)}
    return int(left.pop()) if len(left) == 1 and "" not in left else code


def _wait(launcher: subprocess.Popen, watch: Watch | None, forwarded: Sequence[int]) -> tuple[int, bool]:
    """The launcher's exit code, and whether it was killed because ``watch`` asked for it."""
    if watch is None:
        # Reap orphans of the ranks: after a signal DeepSpeed's launcher would wait for them until it kills them.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)) and ended.si_pid != launcher.pid:
            os.waitpid(ended.si_pid, 0)
        return launcher.wait(), False
    process = psutil.Process(launcher.pid)
    while True:
        try:
            return launcher.wait(timeout=_POLL_SECONDS), False
        except subprocess.TimeoutExpired:
            if watch(process, bool(forwarded)):
                launcher.kill()
                return launcher.wait(), True


def _start(command: Sequence[str], environ: Mapping[str, str], signal_mask: set[int]) -> subprocess.Popen:
    parent = os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)

    return subprocess.Popen(list(command), env=environ, start_new_session=True, preexec_fn=prepare)


def _code_of_ranks(exit_codes: Mapping[int, str]) -> int:
    """The exit code of the first failed rank of this host, 6 if it has not written one; 0 if none failed."""
    codes = {rank: int(code) if code else LaunchError.exit_code for rank, code in exit_codes.items()}
    failed = [rank for rank, code in codes.items() if code]
    if not failed:
        return 0
    # 6 is also the exit code of ranks that exited because of another rank.
    first = min(failed, key=lambda rank: codes[rank] == LaunchError.exit_code)
    how = f"exited with {exit_codes[first]}" if exit_codes[first] else "was killed"
    print_error(f"the launcher exited with 0, but rank {first} of this host {how}")
    return codes[first]


def _inherit_orphans() -> None:
    """Become the parent of all orphaned descendants, instead of init."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_descendants(grace: float) -> None:
    """Send SIGTERM to all descendants, then SIGKILL if they have not ended after ``grace`` seconds."""
    processes = _signal_processes(signal.SIGTERM)
    psutil.wait_procs(processes, timeout=grace)
    _signal_processes(signal.SIGKILL)  # stopped processes, and new children
    psutil.wait_procs(processes, timeout=1)


def _signal_processes(number: int) -> list[psutil.Process]:
    """Send a signal to all descendants except helpers. Returns the processes."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it is ending
            if HELPER not in process.environ():
                process.send_signal(number)
                processes.append(process)
    return processes


def run_with_restarts(start: Callable[[], LauncherExit], progress: Callable[[], object], most: int) -> int:
    """Call ``start``, and again after each failure that a restart may fix, up to ``most`` times.

    Args:
        start: runs the launcher to its end.
        progress: returns the newest checkpoint, or another value that changes with it.
        most: maximum number of restarts.

    Returns the exit code of the last start; 93 after three failures in a row without a new checkpoint.
    """
    failures, reached = 0, progress()
    for number in range(most + 1):
        code, signals, _ = start()
        if signals or code in FINAL:
            return code
        before, reached = reached, progress()
        failures = failures + 1 if reached == before else 0
        if failures == MOST_FAILURES:
            print_error(f"crash loop: {failures} failures in a row without a new checkpoint; not restarted")
            return CRASH_LOOP
        if number == most:
            return code
        print_error(f"the run failed with exit code {code}: restart {number + 1} of {most} (--max-restarts)")
    raise AssertionError("the last start returns")
