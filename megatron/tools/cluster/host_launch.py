"""deepspeed's launcher of one host, without torch and without messages that are no news: started on every host.

Works around two more waits of DeepSpeed 0.19.8's ``launcher/launch.py``. It looks at its ranks once a second; that can
go when it waits for the first one to end. After a signal it waits 30 s for children of its ranks that have ended, if
no process has reaped them; that can go when it ends ranks by their process group. Test: tests/launch/test_supervise.py.
"""

import logging
import os
import time
from collections.abc import Sequence
from types import SimpleNamespace

import psutil

from megatron.tools.cluster.deepspeed_launcher import is_news, without_torch

_LOOKS = 0.1
"""Seconds between two looks at the ranks."""


def main() -> None:
    """Start the ranks of this host, and wait for them: ``deepspeed.launcher.launch``, with its arguments."""
    without_torch(os.environ)
    from deepspeed.launcher import launch

    logging.getLogger("DeepSpeed").addFilter(is_news)
    launch.time = SimpleNamespace(**{**vars(time), "sleep": lambda _: time.sleep(_LOOKS)})
    launch.psutil = SimpleNamespace(**{**vars(psutil), "wait_procs": wait_for_end})
    launch.main()


def wait_for_end(processes: Sequence[psutil.Process], timeout: float) -> tuple[list, list[psutil.Process]]:
    """``psutil.wait_procs``, for which a process that is not reaped, such as a data worker's, has ended, too."""
    deadline = time.monotonic() + timeout
    while (left := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_LOOKS)
    return [process for process in processes if process not in left], left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main()
