"""Start ranks that measure: a program on so many ranks of this machine, and what its first rank reports."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.common.errors import LaunchError
from megatron.common.processes import die_with_parent
from megatron.launch.environment import free_port

ROOT = Path(__file__).parents[2]
_GRACE = 5
"""Seconds in which the other ranks may say why they fail when one has."""
_running: set[subprocess.Popen] = set()


def measured_by_ranks(ranks: int, module: str, *words: str, time_limit: float | None = None, **environ: str) -> Any:
    """What ``benchmarks.measures.MODULE`` hands to ``report()``, started with ``words`` on so many ranks.

    Raises LaunchError where they fail, or take longer than ``time_limit`` seconds.
    """
    with tempfile.NamedTemporaryFile() as log:
        command = ["-m", f"benchmarks.measures.{module}", *words]
        code = run_ranks(ranks, command, Path(log.name), time_limit, **environ)
        output = Path(log.name).read_text(errors="replace")
    found = reported(output)
    if code or not found:
        reason = f"is not finished after {time_limit:.0f} s" if code is None else "failed"
        raise LaunchError(f"{module} on {ranks} ranks {reason}:\n{output.strip()[-2000:]}")
    return found[0]


def run_ranks(
    ranks: int, command: Sequence[str], log: Path, time_limit: float | None = None, **environ: str
) -> int | None:
    """``python COMMAND`` on so many ranks, with the output of all in ``log``: the exit code of the first that failed.

    None if it takes longer than ``time_limit`` seconds. With 0 ranks it is a program that is no rank. No process
    outlives the call, or this process.
    """
    shared = ({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}) | outside(os.environ) | environ
    if ranks:
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    deadline = time.monotonic() + (float("inf") if time_limit is None else time_limit)
    processes: list[subprocess.Popen] = []
    with open(log, "ab") as file:
        try:
            for rank in range(max(ranks, 1)):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                processes.append(_start(command, {**shared, **place}, file))
            return _exit_code(processes, deadline)
        finally:
            for process in processes:
                _kill(process)


def _start(command: Sequence[str], environ: Mapping[str, str], file: Any) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *command], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file,
        stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
    )  # fmt: skip
    _running.add(process)
    return process


def _exit_code(processes: Sequence[subprocess.Popen], deadline: float) -> int | None:
    """Of the first process that failed, 0 if none does, None after the deadline."""
    failed = 0
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if not failed and any(codes):
            failed, deadline = next(filter(None, codes)), min(deadline, time.monotonic() + _GRACE)
        if None not in codes:
            return failed
        time.sleep(0.05)
    return failed or None


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _running.discard(process)


def kill_all() -> None:
    """End all ranks that run, in whatever thread they were started: the calls that wait for them return."""
    for process in tuple(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a program of its own: without what a launcher has set for this process.

    With TORCHELASTIC_USE_AGENT_STORE, for one, torch waits for a store that torchrun hosts elsewhere.
    """
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in environ.items() if not name.startswith(launchers)}


def report(found: Any) -> None:
    """On the first rank: pass on the result."""
    print(f"\n{_MARK}{json.dumps(found)}", flush=True)


def reported(output: str) -> list[Any]:
    """The results that a process has passed on."""
    return [json.loads(line[len(_MARK) :]) for line in output.splitlines() if line.startswith(_MARK)]


_MARK = "measured: "
