"""The deepspeed command, with a truthful exit code; started by tools/launch.py.

DeepSpeed's runner exits with 0 if the launcher it started was killed by a signal: only positive codes are passed on.
"""

import subprocess
import sys

from deepspeed.launcher import runner


class _Remembered(subprocess.Popen):
    """A child process that is known by ``all`` when the runner has forgotten it."""

    all: list[subprocess.Popen] = []

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.all.append(self)


if __name__ == "__main__":
    subprocess.Popen = _Remembered
    runner.main()
    signals = [-child.returncode for child in _Remembered.all if (child.returncode or 0) < 0]
    sys.exit(128 + signals[0] if signals else 0)
