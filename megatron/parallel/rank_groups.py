"""Which ranks form which group, as numbers: what ``mpu.layout`` makes process groups of. No torch here."""

import itertools

from megatron.config import ParallelConfig

AXES = ("pipe", "data", "sequence", "tensor")
"""From the outermost to the innermost: neighbours in rank differ in their place among the tensor-parallel ranks."""


def groups(parallel: ParallelConfig) -> dict[str, list[list[int]]]:
    """The groups along each axis: ranks that differ in their place on this axis alone."""
    sizes = dict(
        zip(
            AXES,
            (
                parallel.pipe_stages,
                parallel.data_parallel_size,
                parallel.ds_sequence_parallel_size,
                parallel.model_parallel_size,
            ),
            strict=True,
        )
    )
    places = list(itertools.product(*map(range, sizes.values())))
    found: dict[str, list[list[int]]] = {}
    for number, axis in enumerate(AXES):
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(places):
            lines.setdefault(place[:number] + place[number + 1 :], []).append(rank)
        found[axis] = list(lines.values())
    return found
