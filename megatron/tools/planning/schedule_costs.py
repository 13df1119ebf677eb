"""Costs of a pipeline schedule: idle time (bubble), and the moments of peak memory of a stage. No torch here."""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from operator import ge

from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import Counts, Moment, PassSeconds, moments, timed


def pipeline_seconds(schedule: Schedule, seconds: Sequence[PassSeconds], transfer: float) -> float:
    """Duration of a schedule, for the ``seconds`` of each stage's passes and of a ``transfer`` between stages."""
    return max(entry.end for entry in timed(schedule, seconds, transfer))


def idle_share(schedule: Schedule, seconds: PassSeconds) -> float:
    """The bubble as a share: idle time of a pipeline divided by its duration."""
    idle = idle_seconds(schedule, seconds)
    return idle / (idle + schedule.micro_batches * schedule.chunks * seconds.total)


def idle_seconds(schedule: Schedule, seconds: PassSeconds) -> float:
    """Idle seconds of each stage between the first pass of the pipeline and its last.

    With more than a few micro-batches per stage they do not depend on the number of micro-batches.
    """
    short = schedule.shortened
    useful = short.micro_batches * short.chunks * seconds.total
    return pipeline_seconds(short, [seconds] * short.stages, 0.0) - useful


def bubble_ratio(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time divided by useful time for 1F1B, or for the interleaved schedule with several ``chunks`` per stage.

    It is (p - 1) / (v m) if all passes of a kind take equally long (arXiv 2104.04473, section 2.2).
    """
    return (stages - 1) / (chunks * micro_batches)


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time divided by the duration of these pipelines: (p - 1) / (v m + p - 1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


@lru_cache(maxsize=4096)
def peaks(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """The moments of possible peak memory of ``stage``: none dominated by another before the same kind of pass."""
    by_pass: dict[tuple[str, int, bool], list[Counts]] = {}
    for kind, chunk, is_first, counts in moments(schedule, stage):
        most = by_pass.setdefault((kind, chunk, is_first), [])
        if not any(all(map(ge, other, counts)) for other in most):
            most[:] = [*(other for other in most if not all(map(ge, counts, other))), counts]
    return tuple(Moment(*passes, counts) for passes, most in by_pass.items() for counts in most)


@lru_cache(maxsize=4096)
def micro_batches_in_flight(schedule: Schedule, stage: int) -> int:
    """Maximum number of micro-batches with tensors kept on ``stage``, as the mean over its chunks."""
    return ceil(max(sum(moment.counts) for moment in peaks(schedule, stage)) / schedule.chunks)


def stages_that_keep_most(schedule: Schedule, first: int, last: int) -> list[int]:
    """Candidates for the stage with peak memory, among the stages ``first`` to ``last`` with equal layers.

    With 1F1B it is the first, which has most micro-batches in flight. With deferred weight gradients or V-shaped chunks
    it may be the last; with ZB-V and few micro-batches one between them, before which all of them have begun.
    """
    p, m = schedule.stages, schedule.micro_batches
    if schedule.name in ("1f1b", "interleaved"):
        return [first]
    between = () if schedule.name != "zbv" else (2 * p - 1 - m, 2 * p - m) if m > p else (m - 2,)
    return sorted({first, last, *(stage for stage in between if first < stage < last)})
