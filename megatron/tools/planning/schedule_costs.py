"""What a pipeline schedule costs: idle time, and the moments at which a stage keeps most. No torch here."""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from operator import ge

from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import Counts, Moment, PassSeconds, moments, timed


def pipeline_seconds(schedule: Schedule, seconds: Sequence[PassSeconds], transfer: float) -> float:
    """Seconds from the first pass of a pipeline to its last: of each stage's passes, and of a ``transfer``."""
    return max(one.end for one in timed(schedule, seconds, transfer))


def idle_share(schedule: Schedule, seconds: PassSeconds) -> float:
    """The bubble: idle time of a pipeline over its time from the first pass to the last."""
    idle = idle_seconds(schedule, seconds)
    return idle / (idle + schedule.micro_batches * schedule.chunks * seconds.total)


def idle_seconds(schedule: Schedule, seconds: PassSeconds) -> float:
    """Seconds that each stage idles between the first pass of the pipeline and its last.

    Beyond a few micro-batches per stage they do not depend on the number of micro-batches.
    """
    short = schedule.shortened
    useful = short.micro_batches * short.chunks * seconds.total
    return pipeline_seconds(short, [seconds] * short.stages, 0.0) - useful


def bubble_ratio(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over useful time of 1F1B, and with several ``chunks`` to a stage of the interleaved schedule.

    (p - 1) / (v m), if all passes of a kind take equally long (arXiv 2104.04473, section 2.2).
    """
    return (stages - 1) / (chunks * micro_batches)


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time of these pipelines over their time: (p - 1) / (v m + p - 1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


@lru_cache(maxsize=4096)
def peaks(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """The moments at which ``stage`` keeps most: none keeps less of everything than another one of the same pass."""
    found: dict[tuple[str, int, bool], list[Counts]] = {}
    for kind, chunk, is_first, counts in moments(schedule, stage):
        most = found.setdefault((kind, chunk, is_first), [])
        if not any(all(map(ge, other, counts)) for other in most):
            most[:] = [*(other for other in most if not all(map(ge, counts, other))), counts]
    return tuple(Moment(*passes, counts) for passes, most in found.items() for counts in most)


@lru_cache(maxsize=4096)
def micro_batches_in_flight(schedule: Schedule, stage: int) -> int:
    """Micro-batches of which ``stage`` keeps tensors at a time, in the mean over its chunks."""
    return ceil(max(sum(moment.counts) for moment in peaks(schedule, stage)) / schedule.chunks)


def stages_that_keep_most(schedule: Schedule, first: int, last: int) -> list[int]:
    """Of the stages from ``first`` to ``last``, which have equal layers, some of which one keeps most.

    With 1F1B the first, where more micro-batches are in flight than later on. With deferred weight gradients, or chunks
    in the shape of a V, perhaps the last one; with ZB-V and few micro-batches one between them, before which all of
    them have begun.
    """
    p, m = schedule.stages, schedule.micro_batches
    if schedule.name in ("1f1b", "interleaved"):
        return [first]
    between = () if schedule.name != "zbv" else (2 * p - 1 - m, 2 * p - m) if m > p else (m - 2,)
    return sorted({first, last, *(stage for stage in between if first < stage < last)})
