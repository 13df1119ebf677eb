"""Creates process groups, each rank only those that it belongs to; matmuls with communication via symmetric memory.

With ``use_local_synchronization`` torch names a group by its ranks and the number of groups that this rank has created
before, and on a GPU splits the world communicator, in which all ranks take part. Therefore all ranks create one group
in each call of ``own_group``, after ``equalize_group_counts``: if a program has created groups on only some ranks,
names would differ, and ranks would wait for each other forever.

With symmetric memory the ranks of a group read each other's GPU memory: a rank multiplies its own shard while copy
engines fetch the shards of the other ranks one by one, so that no collective kernel occupies multiprocessors.

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
    """Create the group of the part with this rank, or a group of only this rank; ``parts`` do not overlap.

    A collective call of all ranks, with the same ``parts``. A group for ``transfers`` has the backend of the default
    group.
    """
    rank = dist.get_rank()
    ranks = next((part for part in parts if rank in part), [rank])
    backend = None if transfers else backend_of_groups(get_accelerator().device_name())
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


def equalize_group_counts() -> None:
    """Create one-rank groups until all ranks have created equally many. A collective call of all ranks."""
    count = len(dist.distributed_c10d._world.pg_names)  # the number in torch's group names; there is no public API
    most = torch.tensor([count], device=get_accelerator().current_device_name())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for _ in range(int(most) - count):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


def new_group(ranks: Sequence[int] | None = None, *, timeout: timedelta) -> ProcessGroup:
    """A process group of ``ranks`` (default: all), with the backend for this device. A collective call of all ranks.

    Without ``timeout`` torch's default would apply: 10 minutes with NCCL, 30 with gloo.
    """
    backend = backend_of_groups(get_accelerator().device_name())
    return dist.new_group(ranks, timeout=timeout, backend=backend)


def maps_memory(group: ProcessGroup, device: str) -> bool:
    """Whether symmetric memory works in ``group``: on one host, with links between all GPUs.

    A collective call of the group, which tries it.
    """
    if device != "cuda" or group.size() == 1 or len(set(_gather_objects(pid_namespace(), group))) > 1:
        return False
    if not all(_gather_objects(_succeeds(lambda: symm_mem.empty(1, device=torch.device("cuda"))), group)):
        return False  # the next call is collective: ranks would wait for a rank that failed here
    # The matmuls below use this workspace.
    is_mapped = _succeeds(lambda: symm_mem.get_symm_mem_workspace(group.group_name, min_size=1))
    return all(_gather_objects(is_mapped, group))


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def _gather_objects(value: object, group: ProcessGroup) -> list[object]:
    values: list[object] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_and_multiply(x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, dim: int) -> Tensor:
    """All-gather along ``dim`` fused with a matmul: x [b, s/t, i], weight [o, i] -> [b, s, o] for ``dim`` 1."""
    gather = torch.ops.symm_mem.fused_all_gather_matmul
    _, (stacked,) = gather(x, [weight.t()], dim, group.group_name, return_A=False)
    y: Tensor = stacked.contiguous()  # a copy, except for dim 0 or a single sample
    return y if bias is None else y.add_(bias)


def multiply_and_scatter(x: Tensor, weight: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Matmul fused with reduce-scatter along ``dim``: x [b, s, i], weight [o, i] -> [b, s/t, o] for ``dim`` 1."""
    summed: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", dim, group.group_name)
    return summed
