"""Expert parallelism: token dispatch to the experts of a layer, which are sharded over data-parallel ranks in order.

A ``Route`` sends tokens to the experts that the router has chosen, and their outputs back. Ranks exchange tokens with
all-to-all (arXiv 2006.16668), or each rank all-gathers the tokens of all ranks and computes those for its experts.
Communication overlaps with computation between its start and its end.

T tokens of this rank, k chosen experts, h hidden, E experts of the layer, e experts of this rank, n rows of this rank's
tokens, m rows that its experts compute
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.mappings import (
    all_gather,
    async_all_gather,
    async_all_to_all,
    async_reduce_scatter,
    conjugate,
    gather_from_sequence_parallel_region,
    start_mapped,
)


def local_experts(experts: int, layout: ParallelLayout) -> range:
    """Indices of this rank's experts among the ``experts`` of a layer."""
    group = layout.expert_group
    if group is None:
        return range(experts)
    count = experts // group.size()
    return range(count * group.rank(), count * (group.rank() + 1))


def mark_expert(parameter: nn.Parameter, layout: ParallelLayout) -> nn.Parameter:
    """Mark ``parameter`` [e, ..] as sharded by expert parallelism.

    DeepSpeed reduces the gradients of marked parameters only over the ranks with the same experts.
    """
    if layout.expert_group is not None:
        parameter.allreduce = False  # type: ignore[attr-defined]  # read by DeepSpeed
        parameter.group_name = group_name(layout.expert_group.size())  # type: ignore[attr-defined]  # read by DeepSpeed
        parameter.expert_group = layout.expert_group  # type: ignore[attr-defined]
    return parameter


def group_name(size: int) -> str:
    """DeepSpeed's name for expert groups of this size."""
    return f"ep_size_{size}"


def expert_group_of(parameter: nn.Parameter) -> ProcessGroup | None:
    """The expert-parallel group that shards ``parameter``; None if it is replicated."""
    return getattr(parameter, "expert_group", None)


Group = ProcessGroup | None
Arriving = Callable[[], Tensor]
"""Waits for a started communication, and returns the received tensor."""


class Slots(NamedTuple):
    """Maps rows sorted by expert to the choices of all tokens, a table of T x k rows."""

    numbers: Tensor
    """Index of each row in the table [n]; T x k for padding rows."""
    tokens: int
    k: int
    is_permutation: bool
    """Whether the rows are a permutation of the table."""

    @property
    def size(self) -> int:
        """Number of rows of the table."""
        return self.tokens * self.k


class Route:
    """Token dispatch without expert parallelism: this rank has all experts."""

    def __init__(self, weights: Tensor, chosen: Tensor, experts: int, group: Group, drops: bool, capacity: int):
        """weights [T, k]; chosen [T, k], which is ``experts`` for dropped choices (only if ``drops``).

        With a ``capacity`` each expert gets exactly that many rows, padded if necessary.
        """
        self.weights = weights
        by_expert, order = chosen.flatten().sort(stable=True)
        self.ends = torch.searchsorted(by_expert, torch.arange(experts, device=chosen.device), right=True)
        """[e]: end of the rows of each local expert, on the device; rows after the last end belong to no expert."""
        numbers = order.masked_fill(by_expert == experts, chosen.numel()) if drops else order
        if capacity:
            numbers, self.ends = _pad_to_capacity(numbers, self.ends, capacity, chosen.numel())
        self.slots = Slots(numbers, chosen.size(0), chosen.size(1), is_permutation=not (drops or capacity))

    def send(self, x: Tensor) -> Arriving:
        """x [T, h] -> rows for this rank's experts, sorted by expert [m, h]."""
        rows = rows_of_tokens(x, self.slots)
        return lambda: rows

    def send_back(self, outputs: Tensor) -> Arriving:
        """Outputs of this rank's experts [m, h] -> weighted sums for this rank's tokens [T, h]."""
        y = sum_of_choices(outputs, self.slots, self.weights)
        return lambda: y


class AllToAllRoute(Route):
    """Token dispatch with all-to-all. Without a capacity the host waits for the numbers of rows."""

    def __init__(self, weights: Tensor, chosen: Tensor, experts: int, group: Group, drops: bool, capacity: int):
        assert group is not None
        self.group = group
        super().__init__(weights, chosen, experts, group, drops, capacity)
        send_counts = self.ends.diff(prepend=self.ends.new_zeros(1)).view(group.size(), -1)  # [ranks, e]
        if capacity:
            receive_counts, self.sent = send_counts, [send_counts.size(1) * capacity] * group.size()
            self.received = self.sent
        else:
            receive_counts = torch.empty_like(send_counts)
            dist.all_to_all_single(receive_counts, send_counts, group=group)
            self.sent, self.received = rows_of_ranks(send_counts, receive_counts)
            self.slots = self.slots._replace(numbers=self.slots.numbers[: sum(self.sent)])
        experts_of_counts = torch.arange(send_counts.size(1), device=chosen.device).repeat(group.size())
        received = experts_of_counts.repeat_interleave(receive_counts.flatten(), output_size=sum(self.received))
        self.by_expert, self.ends = received.argsort(stable=True), receive_counts.sum(0).cumsum(0)

    def send(self, x: Tensor) -> Arriving:
        arriving = self._exchange(rows_of_tokens(x, self.slots), self.sent, self.received)
        return lambda: arriving().index_select(0, self.by_expert)

    def send_back(self, outputs: Tensor) -> Arriving:
        by_rank = outputs.new_empty(outputs.shape).index_copy(0, self.by_expert, outputs)
        arriving = self._exchange(by_rank, self.received, self.sent)
        return lambda: sum_of_choices(arriving(), self.slots, self.weights)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Arriving:
        forward = partial(async_all_to_all, sent=sent, received=received)
        return start_mapped(rows, self.group, forward, partial(async_all_to_all, sent=received, received=sent))


class AllGatherRoute(Route):
    """Token dispatch with all-gather of all tokens. Sizes are fixed, with room for every choice of local experts."""

    def __init__(self, weights: Tensor, chosen: Tensor, experts: int, group: Group, drops: bool, capacity: int):
        assert group is not None
        self.group, ranks, e = group, group.size(), experts // group.size()
        local = all_gather(chosen, group, 0) - e * group.rank()
        local = local.masked_fill((local < 0) | (local > e), e)
        weights = gather_from_sequence_parallel_region(weights, group, 0)
        super().__init__(weights, local, e, group, True, ranks * capacity)
        if not capacity:
            most = local.size(0) * min(local.size(1), e)
            self.slots = self.slots._replace(numbers=self.slots.numbers[:most])

    def send(self, x: Tensor) -> Arriving:
        arriving = start_mapped(x, self.group, _GATHER, _REDUCE)
        return lambda: rows_of_tokens(arriving(), self.slots)

    def send_back(self, outputs: Tensor) -> Arriving:
        y = sum_of_choices(outputs, self.slots, self.weights)
        return start_mapped(y, self.group, _REDUCE, _GATHER)


_GATHER, _REDUCE = partial(async_all_gather, dim=0), partial(async_reduce_scatter, dim=0)

ROUTES = {"alltoall": AllToAllRoute, "allgather": AllGatherRoute}
"""``--moe-token-dispatcher-type`` to its class."""


def rows_of_ranks(send_counts: Tensor, receive_counts: Tensor) -> list[list[int]]:
    """Rows to send to and receive from each rank, from counts by expert [ranks, e]; the host waits for the device."""
    sizes: list[list[int]] = torch.stack([send_counts.sum(1), receive_counts.sum(1)]).cpu().tolist()
    return sizes


def _pad_to_capacity(numbers: Tensor, ends: Tensor, capacity: int, none: int) -> tuple[Tensor, Tensor]:
    """Pad the rows of each expert to ``capacity`` with index ``none``: numbers [n], ends [e] -> [e x capacity], [e]."""
    places = F.pad(ends[:-1], (1, 0)).unsqueeze(1) + torch.arange(capacity, device=ends.device)  # [e, capacity]
    rows = numbers[places.clamp(max=len(numbers) - 1)]
    padded = rows.masked_fill(places >= ends.unsqueeze(1), none)
    return padded.flatten(), torch.arange(1, len(ends) + 1, device=ends.device) * capacity


def rows_of_tokens(x: Tensor, slots: Slots) -> Tensor:
    """Copy tokens into rows sorted by expert: x [T, h] -> [n, h]."""
    return conjugate(x, slots, _copies, _sums)


def sum_of_choices(outputs: Tensor, slots: Slots, weights: Tensor) -> Tensor:
    """Weighted sum of each token's rows: outputs [n, h], weights [T, k] -> [T, h]; missing rows count as zero."""
    table = conjugate(outputs, slots, _table, _rows)
    return (weights.unsqueeze(1) @ table.view(slots.tokens, slots.k, -1)).squeeze(1)


def _copies(x: Tensor, slots: Slots) -> Tensor:
    return x.index_select(0, (slots.numbers // slots.k).clamp_(max=slots.tokens - 1))


def _sums(rows: Tensor, slots: Slots) -> Tensor:
    """Gradient of ``_copies``; deterministic, unlike the gradient of indexing on GPUs."""
    return _table(rows, slots).view(slots.tokens, slots.k, -1).sum(1)


def _table(rows: Tensor, slots: Slots) -> Tensor:
    """Scatter rows into the table of choices: [n, h] -> [T x k, h]; an extra row absorbs padding rows."""
    make = rows.new_empty if slots.is_permutation else rows.new_zeros
    return make((slots.size + 1, rows.size(1))).index_copy_(0, slots.numbers, rows)[: slots.size]


def _rows(table: Tensor, slots: Slots) -> Tensor:
    """Gather rows from the table of choices: [T x k, h] -> [n, h], with zeros for padding rows."""
    rows = table.index_select(0, slots.numbers.clamp(max=slots.size - 1))
    return rows if slots.is_permutation else rows.masked_fill_((slots.numbers == slots.size).unsqueeze(1), 0)
