"""Parallelism: the grid of ranks here, and a package for each axis. No torch here.

rank = ((pipe * data size + data) * sequence size + sequence) * tensor size + tensor
"""

import itertools
from functools import lru_cache

from megatron.config import ParallelConfig

AXES = ("pipe", "data", "sequence", "tensor")
"""Axes of the grid, outermost first: consecutive ranks differ in their tensor-parallel rank."""


def axis_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Number of ranks along each axis, outermost first."""
    return {
        "pipe": parallel.pipe_stages,
        "data": parallel.data_parallel_size,
        "sequence": parallel.sequence_ranks,
        "tensor": parallel.model_parallel_size,
    }


def coordinates(parallel: ParallelConfig, rank: int) -> dict[str, int]:
    """The index of ``rank`` along each axis."""
    indices = itertools.product(*map(range, axis_sizes(parallel).values()))
    return dict(zip(AXES, next(itertools.islice(indices, rank, None)), strict=True))


def groups_along(parallel: ParallelConfig, *axes: str) -> list[list[int]]:
    """The groups of ranks whose coordinates differ only along ``axes``."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(itertools.product(*map(range, axis_sizes(parallel).values()))):
        shared = tuple(index for axis, index in zip(AXES, coordinates, strict=True) if axis not in axes)
        groups.setdefault(shared, []).append(rank)
    return list(groups.values())


def ulysses_groups(parallel: ParallelConfig) -> list[list[int]]:
    """Rank groups of Ulysses all-to-all, which exchange sequence shards for heads: neighbors on the sequence axis."""
    size = parallel.ulysses_size
    return [ranks[n : n + size] for ranks in groups_along(parallel, "sequence") for n in range(0, len(ranks), size)]


def ring_groups(parallel: ParallelConfig) -> list[list[int]]:
    """Rank groups of ring attention: ranks with the same index in the groups of ``ulysses_groups``."""
    size = parallel.ulysses_size
    return [ranks[index::size] for ranks in groups_along(parallel, "sequence") for index in range(size)]


def expert_groups(parallel: ParallelConfig) -> tuple[list[list[int]], list[list[int]]]:
    """Expert-parallel groups, which shard the experts, and expert-data-parallel groups, which have the same experts.

    Both are parts of data-parallel groups, in which consecutive ranks have different experts.
    """
    size, data = parallel.expert_model_parallel_size, groups_along(parallel, "data")
    neighbors = [ranks[begin : begin + size] for ranks in data for begin in range(0, len(ranks), size)]
    return neighbors, [ranks[first::size] for ranks in data for first in range(size)]


def groups(parallel: ParallelConfig) -> dict[str, list[list[int]]]:
    """The groups along each axis."""
    return {axis: groups_along(parallel, axis) for axis in AXES}


def p2p_lanes(stages: int, is_ring: bool) -> dict[tuple[int, int], int]:
    """(sending stage, receiving stage) of neighbors to the number of their process group for transfers.

    In each process group a stage exchanges tensors with one neighbor in one direction, so that no transfer waits for
    another one that a late stage delays. With ``is_ring`` the last stage and the first are neighbors as well.
    """
    pairs = [(stage, (stage + 1) % stages) for stage in range(stages if is_ring and stages > 2 else stages - 1)]
    lanes = {pair: 2 if pair[0] == stages - 1 and stages % 2 else pair[0] % 2 for pair in pairs}
    return lanes | {(late, early): lane + 3 for (early, late), lane in lanes.items()}


@lru_cache
def steps_within(size: int, apart: int, causal: bool) -> tuple[int, ...]:
    """Steps r - r' of ring attention in which some rank r attends to keys of rank r'; the same on every rank.

    The ring has ``size`` ranks, rank r with chunks r and 2 size - 1 - r of the sequence (zigzag). Tokens attend to
    tokens at most ``apart`` chunks away, and only to earlier ones if ``causal``.
    """
    apart = min(apart, 2 * size - 1)
    ranks = [min(number, 2 * size - 1 - number) for number in range(2 * size)]
    pairs = {(ranks[late], ranks[late - back]) for back in range(apart + 1) for late in range(back, 2 * size)}
    pairs |= set() if causal else {(early, late) for late, early in pairs}
    return tuple(sorted({(rank - source) % size for rank, source in pairs}))
