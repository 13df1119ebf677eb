"""The deepspeed command, with a truthful exit code and all variables for the ranks; started by tools/launch.py.

DeepSpeed's runner exits with 0 if the launcher it started was killed by a signal: only positive codes are passed on.
Of torch's and CUDA's variables it sends to other hosts none but NCCL's.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import _project_root  # noqa: F401
from _deepspeed_launch import is_news
from deepspeed.launcher import runner
from deepspeed.utils import logger

from megatron.launch.rank import EXIT_CODE_FOLDER
from megatron.tools.cluster.remote import ALSO_SENT, RUN_VARIABLE


def with_own_launch(words: Any) -> Any:
    """The command that starts the ranks of this host, through tools/_deepspeed_launch.py; other commands unchanged."""
    if isinstance(words, list) and words[2:4] == ["-m", "deepspeed.launcher.launch"]:
        return [*words[:2], str(Path(__file__).with_name("_deepspeed_launch.py")), *words[4:]]
    return words


class _Remembered(subprocess.Popen):
    """A child process that is known by ``all`` when the runner has forgotten it."""

    all: list[subprocess.Popen] = []

    def __init__(self, *args, **kwargs):
        super().__init__(*[with_own_launch(words) for words in args], **kwargs)
        self.all.append(self)


if __name__ == "__main__":
    subprocess.Popen = _Remembered
    logger.addFilter(is_news)
    runner.EXPORT_ENVS += ALSO_SENT
    if RUN_VARIABLE in os.environ:  # an elastic run: its ranks leave their exit codes in a folder that hosts share
        runner.EXPORT_ENVS += (RUN_VARIABLE, EXIT_CODE_FOLDER)
    runner.main()
    signals = [-child.returncode for child in _Remembered.all if (child.returncode or 0) < 0]
    sys.exit(128 + signals[0] if signals else 0)
