"""Check hosts and arguments by a strict grammar, then start DeepSpeed's launcher with the same arguments.

    python tools/launch.py --hostfile hostfile -i worker-1:0,1@worker-2 pretrain_gpt2.py ARGUMENTS

Takes the flags of the deepspeed command. The exit code is the launcher's, 128 + N where signal N ended it; what it
leaves running on this host is ended.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import _project_root  # noqa: F401

from megatron.cli import run_tool
from megatron.cluster.launching import launcher_words, read_launch

RUNNER = Path(__file__).with_name("_deepspeed_runner.py")
GRACE_SECONDS = 10
"""For what is left behind, between being asked to end and being made to."""


def main() -> None:
    """Check, start, wait, clear up."""
    words = launcher_words(read_launch(sys.argv[1:]), os.environ)
    process = subprocess.Popen([sys.executable, str(RUNNER), *words], start_new_session=True)

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = process.wait()
    _end_group(process.pid)
    sys.exit(code if code >= 0 else 128 - code)


def _end_group(group: int) -> None:
    """End the processes that outlived the launcher: ranks, if it was killed."""
    deadline = time.monotonic() + GRACE_SECONDS
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    run_tool(main)
