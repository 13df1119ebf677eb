"""Process groups: each rank makes only the groups that it is in, and waits for no other rank of the world.

Torch names such a group by its ranks and by how many groups this rank has made before, and on a GPU splits the
communicator of the world, in which every rank takes part. So every rank makes one group in each call of ``own_group``,
and ``count_alike`` comes first: groups that a program made before, of some of the ranks only, would let names differ,
and the ranks wait for each other in vain.

And torch's matmuls that communicate through symmetric memory: the ranks of a group read each other's GPU memory. A rank
multiplies its own part while the copy engines fetch the parts of the others, one rank's after the other's. No kernel of
a collective takes multiprocessors from the matmuls.

b batch, s sequence, i inputs, o outputs, t ranks of the group
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symm_mem  # torch has no public name for it

from megatron.common.processes import pid_namespace
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


def maps_memory(group: ProcessGroup, device: str) -> bool:
    """Whether the ranks of ``group`` can map each other's memory: of one host, with links between all their GPUs.

    A collective call, which tries it.
    """
    if device != "cuda" or group.size() == 1 or len(set(_of_ranks(pid_namespace(), group))) > 1:
        return False
    if not all(_of_ranks(_succeeds(lambda: symm_mem.empty(1, device=torch.device("cuda"))), group)):
        return False  # the ranks meet in the next call, where those that can would wait for one that cannot
    # The call of the matmuls below.
    is_mapped = _succeeds(lambda: symm_mem.get_symm_mem_workspace(group.group_name, min_size=1))
    return all(_of_ranks(is_mapped, group))


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def _of_ranks(value: object, group: ProcessGroup) -> list[object]:
    found: list[object] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


def gather_and_multiply(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int) -> Tensor:
    """The matmul of the ranks' shards along ``dim`` together: x [b, s/t, i], weight [o, i] -> [b, s, o] for 1."""
    gather = torch.ops.symm_mem.fused_all_gather_matmul
    _, (stacked,) = gather(x, [weight.t()], dim, group.group_name, return_A=False)
    y: Tensor = stacked.contiguous()  # a copy, but for dim 0 or a single sample
    return y if bias is None else y.add_(bias)


def multiply_and_scatter(x: Tensor, weight: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's shard of the sum of the ranks' matmuls: x [b, s, i], weight [o, i] -> [b, s/t, o] for ``dim`` 1."""
    summed: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", dim, group.group_name)
    return summed
