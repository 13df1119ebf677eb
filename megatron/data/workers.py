"""What a helper process does at its start."""

import os
import signal

from megatron.launch.parent import die_with_parent


def leave_with_parent(parent: int | None = None) -> None:
    """Tie this process to the one that started it, whose number is ``parent``: it may be dead already.

    Ctrl-C reaches every process of a terminal; the parent alone answers it. And the process ends with its parent
    however that dies: it would otherwise wait for work for ever and hold open the parent's locks and connections.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if parent is not None and os.getppid() != parent:
        os._exit(1)
