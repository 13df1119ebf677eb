"""Context parallelism: how a ring of ranks shards a sequence, and sees one another's keys and values.

Each rank has two chunks of the sequence, the r-th and the r-th from the end, so that attention to earlier tokens
is as much work for each (zigzag). Queries stay; keys and values come to every rank, one rank's at a time: passed
around the ring while attention to the previous ones is computed (arXiv 2310.01889), or all of them gathered at once.

R ranks of the ring
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

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
