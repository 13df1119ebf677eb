"""Which ranks form which group, as numbers: the grid that ``ParallelLayout`` makes process groups of. No torch.

rank = ((pipe * data size + data) * sequence size + sequence) * tensor size + tensor
"""

import itertools

from megatron.config import ParallelConfig

AXES = ("pipe", "data", "sequence", "tensor")
"""From the outermost to the innermost: neighboring ranks differ in their tensor-parallel rank."""
REPLICAS = ("data", "sequence")
"""The axes along which ranks hold the same weights."""


def axis_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """Number of ranks along each axis, outermost first."""
    sizes = (
        parallel.pipe_stages,
        parallel.data_parallel_size,
        parallel.ds_sequence_parallel_size,
        parallel.model_parallel_size,
    )
    return dict(zip(AXES, sizes, strict=True))


def groups_along(parallel: ParallelConfig, *axes: str) -> list[list[int]]:
    """The groups of ranks whose coordinates differ along ``axes`` alone."""
    coordinates = itertools.product(*map(range, axis_sizes(parallel).values()))
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in enumerate(coordinates):
        shared = tuple(place for axis, place in zip(AXES, coordinate, strict=True) if axis not in axes)
        found.setdefault(shared, []).append(rank)
    return list(found.values())


def groups(parallel: ParallelConfig) -> dict[str, list[list[int]]]:
    """The groups along each axis."""
    return {axis: groups_along(parallel, axis) for axis in AXES}
