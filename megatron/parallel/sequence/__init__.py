"""Sequence and context parallelism: operations on tensors with a sharded sequence dimension.

Two groups may shard the sequence: the sequence group, and within its shards the tensor group, for activations that it
does not shard otherwise (Megatron's sequence parallelism, arXiv 2205.05198). The sequence group consists of rings for
ring attention (arXiv 2310.01889), of all-to-all groups that exchange sequence shards for heads around attention
(DeepSpeed-Ulysses, arXiv 2309.14509), or of both: rings of all-to-all groups.

Each rank of a ring has two chunks of the sequence, the r-th from the start and the r-th from the end (zigzag), so that
causal attention is equal work for all ranks. Queries stay on their rank. Keys and values are passed around the ring
while attention to the previous ones is computed, or all-gathered.

b batch, s sequence or this rank's shard of it, h hidden, n heads, d size of a head, t ranks of a group, R of a ring
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.config import ModelConfig
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.mappings import (
    all_gather,
    copy_to_model_parallel_region,
    mapped,
    reduce_from_model_parallel_region,
    scatter_to_sequence_parallel_region,
)


def sequence_parallel_dim(config: ModelConfig, layout: ParallelLayout) -> int | None:
    """The dimension along which the tensor group shards hidden states; None without sequence parallelism.

    Sharded hidden states are [b, s/t, h], or [s/t, b, h] for ``--shape-order SBH``.
    """
    return config.sequence_dim if layout.sequence_parallel else None


def sequence_groups(layout: ParallelLayout) -> list[ProcessGroup]:
    """The groups that shard the sequence, outermost first."""
    tensor_group = layout.tensor_group if layout.sequence_parallel else None
    return [group for group in (layout.sequence_group, tensor_group) if group is not None]


def sequence_shard(x: Tensor, layout: ParallelLayout, dim: int, *, of_tensor_group: bool = False) -> Tensor:
    """This rank's shard of ``x`` along the sequence dimension ``dim``; ``x`` itself if the sequence is not sharded.

    ``of_tensor_group`` also applies the sharding of the tensor group. Without gradient.
    """
    if layout.ring_group:
        x = zigzag(x, layout.ring_group, dim)
    for group in (layout.ulysses_group, layout.tensor_group if of_tensor_group and layout.sequence_parallel else None):
        if group:
            x = scatter_to_sequence_parallel_region(x, group, dim)
    return x


def first_token(hidden: Tensor, layout: ParallelLayout, dim: int) -> Tensor:
    """hidden [b, s, h], complete or sharded along ``dim`` -> first token of the sequence [b, h], on every rank."""
    first = hidden.select(dim, 0)
    for group in sequence_groups(layout):
        first = reduce_from_model_parallel_region(first * (group.rank() == 0), group)
    if layout.sequence_group:  # gradients are averaged over it: the rank with the token needs the sum of all ranks
        first = copy_to_model_parallel_region(first, layout.sequence_group)
    return first


def all_to_all(x: Tensor, group: ProcessGroup, *, split_dim: int, concat_dim: int) -> Tensor:
    """All-to-all: send the n-th part of ``split_dim`` to rank n, and concatenate received parts along ``concat_dim``.

    The backward pass swaps both dimensions. For heads [b, n, s/t, d] with ``split_dim=1, concat_dim=2`` each rank gets
    a part of the heads for the entire sequence, [b, n/t, s, d] (arXiv 2309.14509).
    """
    forward = partial(_all_to_all, split_dim=split_dim, concat_dim=concat_dim)
    return mapped(x, group, forward, partial(_all_to_all, split_dim=concat_dim, concat_dim=split_dim))


def _all_to_all(x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), concat_dim)


Contribution = Callable[[int, Tensor], Tensor]
"""contribution(rank, tensor of that rank) -> this rank's contribution to the gradient of that tensor."""


def zigzag(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """This rank's zigzag shard: chunks r and 2R - 1 - r of the 2R chunks of ``x`` along ``dim``. Without gradient."""
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat([chunks[number] for number in chunks_of(group.rank(), group.size())], dim)


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two chunks (of 2 x ``size``) that a rank of a ring of ``size`` ranks holds."""
    return rank, 2 * size - 1 - rank


def of_each_rank(
    x: Tensor, group: ProcessGroup, *, gathers: bool, steps: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Ring exchange: yields (rank, its ``x``) for the ranks ``steps`` before this one; steps start with 0.

    The steps are the same on every rank. Steps that are left out are not sent either.
    """
    rank, size = group.rank(), group.size()
    if gathers:
        gathered = _gather(x, group)
        yield from (((rank - step) % size, gathered[(rank - step) % size]) for step in steps)
        return
    for step, later in zip_longest(steps, steps[1:]):
        arriving = _pass_on(x, group, later - step) if later is not None else None
        yield (rank - step) % size, x
        if arriving is not None:
            x, arriving = arriving(), None


def gradient_of_each_rank(
    x: Tensor, group: ProcessGroup, contribution: Contribution, *, gathers: bool, steps: Sequence[int]
) -> Tensor:
    """Gradient of ``of_each_rank``: the sum over ranks of their ``contribution`` to the gradient of this rank's ``x``.

    In the ring the gradient of ``x`` follows ``x`` from rank to rank, and returns to its own rank last.
    """
    size = group.size()
    if gathers:
        gathered = _gather(x, group)
        total = contribution(0, gathered[0])
        parts = total.new_empty(size, *total.shape)
        for source in range(size):
            parts[source] = contribution(source, gathered[source]) if source else total
        dist.reduce_scatter_tensor(total, parts.flatten(0, 1), group=group)
        return total
    arriving: Callable[[], Tensor] | None = None
    distances = [later - step for step, later in pairwise([*steps, size])]
    sources = of_each_rank(x, group, gathers=False, steps=steps)
    del x  # so that it is freed after its last use
    for (source, source_x), distance in zip(sources, distances, strict=True):
        total = contribution(source, source_x)
        if arriving is not None:
            total += arriving()
            arriving = None
        if distance == size:
            return total
        arriving = _pass_on(total, group, distance)
    assert arriving is not None
    return arriving()


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """All-gather ``x`` [n, ..] -> [R, n, ..]."""
    return all_gather(x, group, 0).unflatten(0, (group.size(), -1))


def _pass_on(x: Tensor, group: ProcessGroup, distance: int) -> Callable[[], Tensor]:
    """Start to send ``x`` to the rank ``distance`` after this one; the result waits for the received tensor."""
    rank, size = group.rank(), group.size()
    sent, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + distance) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - distance) % size),
        ]
    )

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return received

    arrived.sent = sent  # type: ignore[attr-defined]  # keeps the send buffer alive until then
    return arrived
