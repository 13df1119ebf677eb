"""What a helper process does at its start."""

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leave_with_parent() -> None:
    """Tie this process to the one that started it.

    Ctrl-C reaches every process of a terminal; the parent alone answers it. And where the kernel
    offers it (Linux), the process ends with its parent however that dies: it would otherwise wait
    for work for ever and hold open the parent's locks and connections.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
