"""Schedules to look at."""

from collections.abc import Iterable

from megatron.parallel.pipeline.schedule import KINDS, Schedule, has_order

NAMES = [(name, chunks) for name, kind in KINDS.items() for chunks in ([kind.chunks] if kind.chunks else [2, 3, 4])]


def every(name: str, chunks: int, stages: Iterable[int] = range(1, 9)) -> list[Schedule]:
    """The schedules of these numbers of stages, with few and with many micro-batches."""
    return [
        Schedule(name, number, count, chunks)
        for number in stages
        for count in sorted({1, 2, 3, number, number + 1, 2 * number, 2 * number + 3, 4 * number})
        if has_order(name, number, count, chunks)
    ]
