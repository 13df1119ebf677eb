"""Expert parallelism: the experts of a layer are divided over a group of data-parallel ranks, in the ranks' order.

e experts of this rank
"""

from torch import nn
from torch.distributed import ProcessGroup

from megatron.parallel.layout import ParallelLayout


def local_experts(experts: int, layout: ParallelLayout) -> range:
    """Numbers of the experts of this rank, of ``experts`` in a layer."""
    group = layout.expert_group
    if group is None:
        return range(experts)
    count = experts // group.size()
    return range(count * group.rank(), count * (group.rank() + 1))


def mark_expert(parameter: nn.Parameter, layout: ParallelLayout) -> nn.Parameter:
    """Mark ``parameter`` [e, ..] as belonging to experts that expert parallelism divides.

    DeepSpeed reduces the gradients of marked parameters only over the ranks with the same experts.
    """
    if layout.expert_group is not None:
        parameter.allreduce = False  # type: ignore[attr-defined]  # DeepSpeed's mark
        parameter.group_name = group_name(layout.expert_group.size())  # type: ignore[attr-defined]  # the same
        parameter.expert_group = layout.expert_group  # type: ignore[attr-defined]
    return parameter


def group_name(size: int) -> str:
    """DeepSpeed's name for expert groups of this size."""
    return f"ep_size_{size}"


def expert_group_of(parameter: nn.Parameter) -> ProcessGroup | None:
    """The ranks that divide the experts of ``parameter``; None if it is replicated."""
    return getattr(parameter, "expert_group", None)
