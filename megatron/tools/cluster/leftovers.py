"""End what an earlier start of a run left on a host: sent to hosts as a part of ``megatron.tools.cluster.probe``.

Standard library alone. Only processes that carry the variable of that run in their environment are ended; all are of
this user, since others' environments cannot be read.
"""

import contextlib
import os
import signal
import time

from megatron.checkpoint.folder_lock import machine_id, start_time


def end_leftovers(request):
    """SIGKILL to every process of the run. Returns how many are left, and whether the owner of its lock has ended.

    ``request`` has ``variable``, NAME=VALUE as in the environment of the run; ``seconds`` to wait; and ``owner``, the
    machine, process id and start time of the process that has the lock of the checkpoints, or None.
    """
    deadline, ended = time.monotonic() + request["seconds"], set()
    while (left := _processes(request["variable"])) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        time.sleep(0.02)
    owner = request["owner"]
    has_ended = owner is not None and owner[0] == machine_id() and start_time(owner[1]) != owner[2]
    return {"ended": len(ended), "left": len(left), "owner_has_ended": has_ended}


def _processes(variable):
    """Processes that have ``variable`` in their environment and have not ended."""
    word, found = variable.encode(), []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and start_time(int(name)):
                with open(f"/proc/{name}/environ", "rb") as file:
                    if word in file.read().split(b"\0"):
                        found.append(int(name))
    return found
