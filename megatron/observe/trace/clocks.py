"""One clock for all ranks."""

from collections.abc import Callable
from statistics import median

import torch.distributed as dist

_ROUNDS = 16


def seconds_ahead(clock: Callable[[], float]) -> float:
    """How far this rank's ``clock`` is ahead of rank 0's; 0.0 where no difference can be told.

    Every rank must call it. All leave a barrier at about the same time, and over some of them chance evens out; on one
    host the ranks have one clock, and the differences lie on both sides of zero.
    """
    stamps = []
    for _ in range(_ROUNDS):
        dist.barrier()
        stamps.append(clock())
    everyone: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, stamps)
    differences = [own - first for own, first in zip(stamps, everyone[0], strict=True)]
    return 0.0 if min(differences) <= 0 <= max(differences) else median(differences)
