"""Train on a layout as a user does: pretrain_gpt2.py in processes of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from megatron.verify.names import Layout
from megatron.verify.request import Request

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt2.py"


class Finished(NamedTuple):
    """How a run ended."""

    seconds: float
    failure: str | None
    """Its last words, if it failed."""


def train(request: Request, layout: Layout, folder: Path, time_limit: float) -> Finished:
    """Train on ``layout`` and wait for it; metrics and checkpoint are in ``folder`` then."""
    command = [sys.executable, str(PROGRAM), *request.command(layout, folder)]
    if layout.processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(layout.processes)]
        command[1:1] = launcher
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, env=dict(request.environ), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        failure = None
        try:
            if code := process.wait(time_limit):
                failure = f"exit code {code}:\n{_last_words(output)}"
        except subprocess.TimeoutExpired:
            failure = f"no end after {time_limit:g} s:\n{_last_words(output)}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return Finished(time.monotonic() - start, failure)


def _last_words(output: TextIO, lines: int = 15) -> str:
    output.seek(0)
    return "\n".join(f"    {line}" for line in output.read().splitlines()[-lines:])
