"""Expert parallelism: tokens are sent to the ranks of their chosen experts, and the outputs are sent back.

The experts of a layer are divided over a group of data-parallel ranks, in the order of the ranks. Before
tokens are sent, the ranks exchange their counts, so that no token is dropped.

n rows that are sent, one for each token and chosen expert; m rows received; h hidden; e experts of this rank
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.mappings import mapped


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


@dataclass(frozen=True)
class Route:
    """How the rows of one layer's tokens are sent to their experts."""

    order: Tensor
    """[n]: rows in the order in which they are sent, sorted by expert."""
    group: ProcessGroup | None
    sent: list[int]
    """Rows for each rank of the group."""
    received: list[int]
    by_expert: Tensor | None
    """[m]: the received rows in the order of experts; None if they are sorted already."""
    ends: Tensor
    """[e]: the ends of the rows of each expert of this rank, on the device."""

    @classmethod
    def of(cls, chosen: Tensor, experts: int, group: ProcessGroup | None) -> "Route":
        """The route of rows whose experts, below ``experts``, are ``chosen`` [n]. Every rank of the group calls it."""
        by_expert, order = chosen.sort(stable=True)
        ends = torch.searchsorted(by_expert, torch.arange(experts, device=chosen.device), right=True)
        if group is None or group.size() == 1:
            return cls(order, None, [], [], None, ends)
        going = ends.diff(prepend=ends.new_zeros(1)).view(group.size(), -1)  # [ranks, e]
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going, group=group)
        sent, received = rows_of_ranks(going, coming)
        numbers = torch.arange(going.size(1), device=chosen.device).repeat(group.size())
        arrived = numbers.repeat_interleave(coming.flatten(), output_size=sum(received))
        return cls(order, group, sent, received, arrived.argsort(stable=True), coming.sum(0).cumsum(0))

    def dispatch(self, rows: Tensor) -> Tensor:
        """Sorted rows [n, h] -> the rows for the experts of this rank, sorted by expert [m, h]."""
        if self.group is None or self.by_expert is None:
            return rows
        return self._exchange(rows, self.sent, self.received).index_select(0, self.by_expert)

    def combine(self, outputs: Tensor) -> Tensor:
        """Outputs of the experts of this rank [m, h] -> outputs of the sorted rows [n, h]."""
        if self.group is None or self.by_expert is None:
            return outputs
        in_order = outputs.new_empty(outputs.shape).index_copy(0, self.by_expert, outputs)
        return self._exchange(in_order, self.received, self.sent)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        assert self.group is not None, "there is nothing to exchange"
        forth = partial(_all_to_all, sent=sent, received=received)
        return mapped(rows, self.group, forth, partial(_all_to_all, sent=received, received=sent))


def rows_of_ranks(going: Tensor, coming: Tensor) -> list[list[int]]:
    """Rows sent to and received from each rank, of their numbers by expert [ranks, e]: the host waits for them."""
    sizes: list[list[int]] = torch.stack([going.sum(1), coming.sum(1)]).cpu().tolist()
    return sizes


def _all_to_all(rows: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    """Send the first ``sent[0]`` rows to the first rank, and so on: [n, h] -> [m, h]."""
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
