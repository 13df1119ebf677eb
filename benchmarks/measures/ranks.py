"""Start ranks that measure: a module of this folder under torchrun, and the result of its first rank."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.common.errors import LaunchError

ROOT = Path(__file__).parents[2]


def measured_by_ranks(ranks: int, module: str, *words: str, time_limit: float | None = None, **environ: str) -> Any:
    """What ``benchmarks.measures.MODULE`` hands to ``report()``, started with ``words`` on so many ranks.

    Raises LaunchError where they fail, or take longer than ``time_limit`` seconds.
    """
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", f"benchmarks.measures.{module}", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ}, **pipes)
    try:
        output, errors = process.communicate(timeout=time_limit)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{module} is not finished after {time_limit:g} s") from None
    finally:
        _end(process)
    found = reported(output)
    if process.returncode or not found:
        raise LaunchError(f"{ranks} ranks of {module} failed:\n{(errors or output).strip()[-2000:]}")
    return found[0]


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a program of its own: without what a launcher has set for this process.

    With TORCHELASTIC_USE_AGENT_STORE, for one, torch waits for a store that torchrun hosts elsewhere.
    """
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in environ.items() if not name.startswith(launchers)}


def _end(process: subprocess.Popen) -> None:
    """End the launcher if it still runs; it ends its ranks when it is asked to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def report(found: Any) -> None:
    """On the first rank: pass on the result."""
    print(_MARK + json.dumps(found), flush=True)


def reported(output: str) -> list[Any]:
    """The results that a process has passed on."""
    return [json.loads(line[len(_MARK) :]) for line in output.splitlines() if line.startswith(_MARK)]


_MARK = "measured: "
