"""Expert parallelism: the experts of a layer are divided over a group of data-parallel ranks, in the ranks' order.

*Routes* bring tokens to the experts that the router has chosen, and the outputs back to the tokens. Experts of all
ranks of a group receive tokens by all-to-all (arXiv 2006.16668), or each rank gathers the tokens of all ranks, and
computes only those of its experts. Communication runs during what is computed between its start and its end.

T tokens of this rank, k chosen experts, h hidden, E experts of the layer, e of this rank, n rows of this rank's tokens,
m rows that its experts compute
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


Group = ProcessGroup | None
Arriving = Callable[[], Tensor]
"""Waits for what a rank receives."""


class Slots(NamedTuple):
    """Where rows that are sorted by expert are in the table of tokens and choices, of T x k rows."""

    numbers: Tensor
    """[n]: the row of the table; T x k for a row that is in none, and only fills up a fixed size."""
    tokens: int
    k: int
    is_permutation: bool
    """Whether the n rows are exactly those of the table."""

    @property
    def size(self) -> int:
        """Rows of the table."""
        return self.tokens * self.k


class Route:
    """For experts that this rank has all."""

    def __init__(self, weights: Tensor, chosen: Tensor, experts: int, group: Group, drops: bool, capacity: int):
        """weights [T, k]; chosen [T, k], ``experts`` where the choice is dropped, as some are if ``drops``.

        With a ``capacity`` each expert gets that many rows, which some rows of no token fill up.
        """
        self.weights = weights
        by_expert, order = chosen.flatten().sort(stable=True)
        self.ends = torch.searchsorted(by_expert, torch.arange(experts, device=chosen.device), right=True)
        """[e]: the ends of the rows of each expert of this rank, on the device; rows after the last one have none."""
        numbers = order.masked_fill(by_expert == experts, chosen.numel()) if drops else order
        if capacity:
            numbers, self.ends = _filled_up(numbers, self.ends, capacity, chosen.numel())
        self.slots = Slots(numbers, chosen.size(0), chosen.size(1), is_permutation=not (drops or capacity))

    def send(self, x: Tensor) -> Arriving:
        """x [T, h] -> the rows for the experts of this rank, sorted by expert [m, h]."""
        rows = rows_of_tokens(x, self.slots)
        return lambda: rows

    def send_back(self, outputs: Tensor) -> Arriving:
        """Outputs of the experts of this rank [m, h] -> weighted sums for the tokens [T, h]."""
        y = sum_of_choices(outputs, self.slots, self.weights)
        return lambda: y


class AllToAllRoute(Route):
    """Each rank sends rows to the ranks of their experts. Without a capacity the host waits for their numbers."""

    def __init__(self, weights: Tensor, chosen: Tensor, experts: int, group: Group, drops: bool, capacity: int):
        assert group is not None
        self.group = group
        super().__init__(weights, chosen, experts, group, drops, capacity)
        going = self.ends.diff(prepend=self.ends.new_zeros(1)).view(group.size(), -1)  # [ranks, e]
        if capacity:
            coming, self.sent = going, [going.size(1) * capacity] * group.size()
            self.received = self.sent
        else:
            coming = torch.empty_like(going)
            dist.all_to_all_single(coming, going, group=group)
            self.sent, self.received = rows_of_ranks(going, coming)
            self.slots = self.slots._replace(numbers=self.slots.numbers[: sum(self.sent)])
        numbers = torch.arange(going.size(1), device=chosen.device).repeat(group.size())
        arrived = numbers.repeat_interleave(coming.flatten(), output_size=sum(self.received))
        self.by_expert, self.ends = arrived.argsort(stable=True), coming.sum(0).cumsum(0)

    def send(self, x: Tensor) -> Arriving:
        arriving = self._exchange(rows_of_tokens(x, self.slots), self.sent, self.received)
        return lambda: arriving().index_select(0, self.by_expert)

    def send_back(self, outputs: Tensor) -> Arriving:
        in_order = outputs.new_empty(outputs.shape).index_copy(0, self.by_expert, outputs)
        arriving = self._exchange(in_order, self.received, self.sent)
        return lambda: sum_of_choices(arriving(), self.slots, self.weights)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Arriving:
        forth = partial(async_all_to_all, sent=sent, received=received)
        return start_mapped(rows, self.group, forth, partial(async_all_to_all, sent=received, received=sent))


class AllGatherRoute(Route):
    """Each rank gathers the tokens of all ranks. All sizes are fixed: room for every choice of experts of this rank."""

    def __init__(self, weights: Tensor, chosen: Tensor, experts: int, group: Group, drops: bool, capacity: int):
        assert group is not None
        self.group, ranks, e = group, group.size(), experts // group.size()
        own = all_gather(chosen, group, 0) - e * group.rank()
        own = own.masked_fill((own < 0) | (own > e), e)
        weights = gather_from_sequence_parallel_region(weights, group, 0)
        super().__init__(weights, own, e, group, True, ranks * capacity)
        if not capacity:
            most = own.size(0) * min(own.size(1), e)
            self.slots = self.slots._replace(numbers=self.slots.numbers[:most])

    def send(self, x: Tensor) -> Arriving:
        arriving = start_mapped(x, self.group, _GATHER, _REDUCE)
        return lambda: rows_of_tokens(arriving(), self.slots)

    def send_back(self, outputs: Tensor) -> Arriving:
        y = sum_of_choices(outputs, self.slots, self.weights)
        return start_mapped(y, self.group, _REDUCE, _GATHER)


_GATHER, _REDUCE = partial(async_all_gather, dim=0), partial(async_reduce_scatter, dim=0)

ROUTES = {"alltoall": AllToAllRoute, "allgather": AllGatherRoute}
"""By ``--moe-token-dispatcher-type``."""


def rows_of_ranks(going: Tensor, coming: Tensor) -> list[list[int]]:
    """Rows sent to and received from each rank, of their numbers by expert [ranks, e]: the host waits for them."""
    sizes: list[list[int]] = torch.stack([going.sum(1), coming.sum(1)]).cpu().tolist()
    return sizes


def _filled_up(numbers: Tensor, ends: Tensor, capacity: int, none: int) -> tuple[Tensor, Tensor]:
    """numbers [n] with ``ends`` [e] -> [e x capacity], with ``none`` after those of each expert, and their ends."""
    places = F.pad(ends[:-1], (1, 0)).unsqueeze(1) + torch.arange(capacity, device=ends.device)  # [e, capacity]
    own = numbers[places.clamp(max=len(numbers) - 1)]
    filled = own.masked_fill(places >= ends.unsqueeze(1), none)
    return filled.flatten(), torch.arange(1, len(ends) + 1, device=ends.device) * capacity


def rows_of_tokens(x: Tensor, slots: Slots) -> Tensor:
    """x [T, h] -> [n, h]: each row a copy of its token."""
    return conjugate(x, slots, _copies, _sums)


def sum_of_choices(outputs: Tensor, slots: Slots, weights: Tensor) -> Tensor:
    """Outputs [n, h], weights [T, k] -> [T, h]: for each token the weighted sum of its rows, zero for absent ones."""
    table = conjugate(outputs, slots, _table, _rows)
    return (weights.unsqueeze(1) @ table.view(slots.tokens, slots.k, -1)).squeeze(1)


def _copies(x: Tensor, slots: Slots) -> Tensor:
    return x.index_select(0, (slots.numbers // slots.k).clamp_(max=slots.tokens - 1))


def _sums(rows: Tensor, slots: Slots) -> Tensor:
    """The same in every run, as the gradient of indexing would not be on GPUs."""
    return _table(rows, slots).view(slots.tokens, slots.k, -1).sum(1)


def _table(rows: Tensor, slots: Slots) -> Tensor:
    """[n, h] -> [T x k, h], of one more row, which takes the rows of no token, whatever they contain."""
    make = rows.new_empty if slots.is_permutation else rows.new_zeros
    return make((slots.size + 1, rows.size(1))).index_copy_(0, slots.numbers, rows)[: slots.size]


def _rows(table: Tensor, slots: Slots) -> Tensor:
    """[T x k, h] -> [n, h], with zeros for rows of no token."""
    rows = table.index_select(0, slots.numbers.clamp(max=slots.size - 1))
    return rows if slots.is_permutation else rows.masked_fill_((slots.numbers == slots.size).unsqueeze(1), 0)
