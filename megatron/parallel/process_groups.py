"""Process groups: each rank makes only the groups that it is in, and waits for no other rank of the world.

Torch names such a group by its ranks and by how many groups this rank has made before, and on a GPU splits the
communicator of the world, in which every rank takes part. So every rank makes one group in each call of ``own_group``,
and ``count_alike`` comes first: groups that a program made before, of some of the ranks only, would let names differ,
and the ranks wait for each other in vain.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import ProcessGroup

from megatron.parallel.shared_memory import backend_of_groups


def own_group(parts: Sequence[Sequence[int]], *, timeout: timedelta, transfers: bool = False) -> ProcessGroup:
    """The group of this rank's part; one of this rank alone if it is in none of ``parts``, which do not overlap.

    Every rank of the world makes this call, with the same ``parts``. A group for ``transfers`` has the backend of the
    default group.
    """
    rank = dist.get_rank()
    ranks = next((part for part in parts if rank in part), [rank])
    backend = None if transfers else backend_of_groups(get_accelerator().device_name())
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


def count_alike() -> None:
    """Make groups of this rank alone until every rank of the world has as many. Every rank makes this call."""
    count = len(dist.distributed_c10d._world.pg_names)  # as torch does for its names; nothing public tells it
    most = torch.tensor([count], device=get_accelerator().current_device_name())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for _ in range(int(most) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def new_group(ranks: Sequence[int] | None = None, *, timeout: timedelta) -> ProcessGroup:
    """A process group of ``ranks``, or of all, with the backend that a run uses on this device. All ranks make it.

    Without ``timeout`` torch's default would apply: 10 minutes with NCCL, 30 with gloo.
    """
    backend = backend_of_groups(get_accelerator().device_name())
    return dist.new_group(ranks, timeout=timeout, backend=backend)
