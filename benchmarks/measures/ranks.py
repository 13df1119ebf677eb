"""Start ranks that measure: a module of this folder under torchrun, and the result of its first rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron.config.errors import LaunchError

ROOT = Path(__file__).parents[2]


def measured_by_ranks(ranks: int, module: str, *words: str, **environ: str) -> Any:
    """What ``benchmarks.measures.MODULE`` hands to ``report()``, started with ``words`` on so many ranks.

    Raises LaunchError where they fail.
    """
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", f"benchmarks.measures.{module}", *words]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True)
    reported = [line[len(_MARK) :] for line in ended.stdout.splitlines() if line.startswith(_MARK)]
    if ended.returncode or not reported:
        raise LaunchError(f"{ranks} ranks of {module} failed:\n{(ended.stderr or ended.stdout).strip()[-2000:]}")
    return json.loads(reported[0])


def report(found: Any) -> None:
    """On the first rank: pass on the result."""
    print(_MARK + json.dumps(found), flush=True)


_MARK = "measured: "
