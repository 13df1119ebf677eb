"""Check hosts and arguments by a strict grammar, then start DeepSpeed's launcher with the same arguments.

    python tools/launch.py --hostfile hostfile -i worker-1:0,1@worker-2 pretrain_gpt2.py ARGUMENTS

Takes the flags of the deepspeed command. The exit code is the launcher's, 128 + N where signal N ended it; what it
leaves running on this host is ended. With --max-restarts N a run that died is started again, to go on from its newest
checkpoint; 93: it died three times in a row without a new one.
"""

import os
import sys
from pathlib import Path

import _project_root  # noqa: F401

from megatron.tools.cluster.launching import checkpoint_watch, launcher_words, read_launch
from megatron.tools.cluster.remote import ssh_patience
from megatron.tools.cluster.supervise import run_with_restarts, supervise
from megatron.tools.command_line import run_tool

RUNNER = Path(__file__).with_name("_deepspeed_runner.py")


def main() -> None:
    """Check, start, wait, clear up; and again, if it died and may be started again."""
    launch = read_launch(sys.argv[1:])
    command = [sys.executable, str(RUNNER), *launcher_words(launch, os.environ)]
    progress = checkpoint_watch(launch.arguments) if launch.max_restarts else lambda: None
    environ = {**os.environ, **ssh_patience(os.environ)}
    sys.exit(run_with_restarts(lambda: supervise(command, environ), progress, launch.max_restarts))


if __name__ == "__main__":
    run_tool(main)
