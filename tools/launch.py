"""Check hosts and arguments by a strict grammar, then start DeepSpeed's launcher with the same arguments.

    python tools/launch.py --hostfile hostfile -i worker-1:0,1@worker-2 pretrain_gpt2.py ARGUMENTS

Takes the flags of the deepspeed command. The exit code is the launcher's, 128 + N where signal N ended it.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

import _project_root  # noqa: F401

from megatron.cli import run_tool
from megatron.cluster.launching import launch_command, read_launch


def main() -> None:
    """Check, start, wait."""
    command = launch_command(read_launch(sys.argv[1:]), os.environ)
    sys.stdout.flush()
    process = subprocess.Popen(command)

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    code = process.wait()
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    run_tool(main)
