"""Check hosts and arguments by a strict grammar, then start DeepSpeed's launcher with the same arguments.

    python tools/launch.py --hostfile hostfile -i worker-1:0,1@worker-2 pretrain_gpt2.py ARGUMENTS

Takes the flags of the deepspeed command. The exit code is the launcher's, 128 + N where signal N ended it; what it
leaves running on this host is ended.
"""

import os
import sys
from pathlib import Path

import _project_root  # noqa: F401

from megatron.cli import run_tool
from megatron.cluster.launching import launcher_words, read_launch
from megatron.launch.supervise import supervise

RUNNER = Path(__file__).with_name("_deepspeed_runner.py")


def main() -> None:
    """Check, start, wait, clear up."""
    words = launcher_words(read_launch(sys.argv[1:]), os.environ)
    sys.exit(supervise([sys.executable, str(RUNNER), *words], os.environ))


if __name__ == "__main__":
    run_tool(main)
