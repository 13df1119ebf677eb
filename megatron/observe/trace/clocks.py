"""One clock for all ranks."""

import socket
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch.distributed as dist

_ROUNDS = 16


def machine() -> str:
    """A name of the running kernel, whose processes have one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def seconds_ahead(clock: Callable[[], float], machine: str) -> float:
    """How far this rank's ``clock`` is ahead of rank 0's; 0.0 on the same ``machine``.

    Every rank must call it. All leave a barrier at about the same time, and over some of them chance evens out. The
    first rank of a machine speaks for the others on it.
    """
    stamps = []
    for _ in range(_ROUNDS):
        dist.barrier()
        stamps.append(clock())
    everyone: list[tuple[str, list[float]]] = [("", [])] * dist.get_world_size()
    dist.all_gather_object(everyone, (machine, stamps))
    speaker = next(stamps for place, stamps in everyone if place == machine)
    return median(own - first for own, first in zip(speaker, everyone[0][1], strict=True))
