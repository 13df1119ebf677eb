"""What a helper process does at its start."""

import signal

from megatron.launch.parent import die_with_parent


def leave_with_parent() -> None:
    """Tie this process to the one that started it.

    Ctrl-C reaches every process of a terminal; the parent alone answers it. And the process ends with its parent
    however that dies: it would otherwise wait for work for ever and hold open the parent's locks and connections.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
