"""Parallelism along the sequence: operations on tensors whose sequence dimension is sharded.

Two groups may shard the sequence: the sequence group, and within its shards the tensor group, which shards
whatever it does not shard otherwise (Megatron's sequence parallelism, arXiv 2205.05198). The sequence group
consists of rings, whose ranks see one another's keys and values (arXiv 2310.01889), of groups that
exchange parts of the sequence for heads around attention (DeepSpeed-Ulysses, arXiv 2309.14509), or of both:
then each rank of a ring is such a group.

Each rank of a ring has two chunks of the sequence, the r-th and the r-th from the end, so that attention to earlier
tokens is as much work for each (zigzag). Queries stay; keys and values come to every rank, one rank's at a time: passed
around the ring while attention to the previous ones is computed, or all of them gathered at once.

b batch, s sequence, or this rank's shard of it, h hidden, n heads, d size of a head, t ranks of the group, R of a ring
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
    copy_to_model_parallel_region,
    mapped,
    reduce_from_model_parallel_region,
    scatter_to_sequence_parallel_region,
)


def sequence_parallel_dim(config: ModelConfig, layout: ParallelLayout) -> int | None:
    """The dimension along which the tensor group shards hidden states; None without sequence parallelism.

    Sharded they are [b, s/t, h], or [s/t, b, h] for ``--shape-order SBH``.
    """
    return config.sequence_dim if layout.sequence_parallel else None


def sequence_groups(layout: ParallelLayout) -> list[ProcessGroup]:
    """The groups that shard the sequence, in the order in which they do."""
    tensor_group = layout.tensor_group if layout.sequence_parallel else None
    return [group for group in (layout.sequence_group, tensor_group) if group is not None]


def sequence_shard(x: Tensor, layout: ParallelLayout, dim: int, *, of_tensor_group: bool = False) -> Tensor:
    """This rank's shard of ``x`` along ``dim``, the sequence; all of ``x`` if nothing shards it.

    With ``of_tensor_group`` it is the tensor group's shard of that. Without gradient.
    """
    if layout.ring_group:
        x = zigzag(x, layout.ring_group, dim)
    for group in (layout.ulysses_group, layout.tensor_group if of_tensor_group and layout.sequence_parallel else None):
        if group:
            x = scatter_to_sequence_parallel_region(x, group, dim)
    return x


def first_token(hidden: Tensor, layout: ParallelLayout, dim: int) -> Tensor:
    """hidden [b, s, h], complete or sharded along ``dim`` -> the sequence's first token [b, h], on every rank."""
    first = hidden.select(dim, 0)
    for group in sequence_groups(layout):
        first = reduce_from_model_parallel_region(first * (group.rank() == 0), group)
    if layout.sequence_group:  # averages gradients: the rank that holds the token needs the sum of all ranks'
        first = copy_to_model_parallel_region(first, layout.sequence_group)
    return first


def all_to_all(x: Tensor, group: ProcessGroup, *, split_dim: int, concat_dim: int) -> Tensor:
    """Send the n-th part of ``split_dim`` to rank n, and concatenate what is received along ``concat_dim``.

    Backward is the same with both dimensions swapped. For heads [b, n, s/t, d] with ``split_dim=1, concat_dim=2``
    each rank receives a part of the heads for the entire sequence, [b, n/t, s, d] (arXiv 2309.14509).
    """
    forward = partial(_all_to_all, split_dim=split_dim, concat_dim=concat_dim)
    return mapped(x, group, forward, partial(_all_to_all, split_dim=concat_dim, concat_dim=split_dim))


def _all_to_all(x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), concat_dim)


Contribution = Callable[[int, Tensor], Tensor]
"""contribution(rank, tensor of that rank) -> what this rank adds to its gradient, of the same shape."""


def zigzag(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Chunks r and 2R - 1 - r of the 2R chunks of ``x`` along ``dim``. Without gradient."""
    chunks = x.chunk(2 * group.size(), dim)
    return torch.cat([chunks[number] for number in chunks_of(group.rank(), group.size())], dim)


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Numbers of the chunks that a rank of a ring of ``size`` ranks has, of 2 x size."""
    return rank, 2 * size - 1 - rank


def of_each_rank(
    x: Tensor, group: ProcessGroup, *, gathers: bool, steps: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """(rank, its ``x``) for ranks of ``group``: that many ``steps`` before this one, from 0, the same on every rank.

    A step that is left out is not passed around, either.
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
    """The sum over all ranks of their ``contribution`` to the gradient of this rank's ``x``, in the type that it has.

    Passed around, the gradient of a rank's ``x`` follows it and comes home last. ``steps`` as in ``of_each_rank``.
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
    following: Callable[[], Tensor] | None = None
    distances = [later - step for step, later in pairwise([*steps, size])]
    sources = of_each_rank(x, group, gathers=False, steps=steps)
    del x  # which its last user frees
    for (source, of_source), distance in zip(sources, distances, strict=True):
        total = contribution(source, of_source)
        if following is not None:
            total += following()
            following = None
        if distance == size:
            return total
        following = _pass_on(total, group, distance)
    assert following is not None
    return following()


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """``x`` [n, ..] of each rank: [R, n, ..]."""
    gathered = x.new_empty(group.size() * x.size(0), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (group.size(), -1))


def _pass_on(x: Tensor, group: ProcessGroup, distance: int) -> Callable[[], Tensor]:
    """Start to send ``x`` to the rank ``distance`` after this one. The result waits for that of the rank before."""
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

    arrived.sent = sent  # type: ignore[attr-defined]  # its memory is in use until then
    return arrived
