"""What a pipeline stage keeps of the micro-batches in flight: activations, and deferred weight gradients. No torch."""

from functools import lru_cache
from math import ceil
from operator import add, ge
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS, Schedule

Counts = tuple[int, ...]
"""For each model chunk of a stage, in the order of the model: micro-batches with activations, and micro-batches with
tensors for W, after I."""


class Moment(NamedTuple):
    """A pass that is no forward pass, and what its stage keeps before it."""

    kind: str
    chunk: int
    """Which of the chunks of the stage the pass runs through, from 0 on."""
    is_first: bool
    """Whether no backward pass of the stage has run yet, so that there are no gradients of its weights."""
    counts: Counts


def in_flight(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """For each chunk of a stage the forward passes whose activations are kept, at the moment with most of them."""
    return max(counts_in_flight(schedule, stage), key=sum)


@lru_cache(maxsize=4096)
def counts_in_flight(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """For each chunk of a stage the forward passes whose B or W is not done; all counts before a B, I or W."""
    counts = (moment.counts for moment in _moments(schedule, stage))
    return tuple(dict.fromkeys(tuple(map(add, one[::2], one[1::2])) for one in counts))


@lru_cache(maxsize=4096)
def peaks(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """The moments at which ``stage`` keeps most: none keeps less of everything than another one of the same pass."""
    found: dict[tuple[str, int, bool], list[Counts]] = {}
    for kind, chunk, is_first, counts in _moments(schedule, stage):
        most = found.setdefault((kind, chunk, is_first), [])
        if not any(all(map(ge, other, counts)) for other in most):
            most[:] = [*(other for other in most if not all(map(ge, counts, other))), counts]
    return tuple(Moment(*passes, counts) for passes, most in found.items() for counts in most)


@lru_cache(maxsize=4096)
def micro_batches_in_flight(schedule: Schedule, stage: int) -> int:
    """Micro-batches of which ``stage`` keeps tensors at a time, in the mean over its chunks."""
    return ceil(max(sum(moment.counts) for moment in peaks(schedule, stage)) / schedule.chunks)


@lru_cache(maxsize=4096)
def _moments(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """Every B, I and W of ``stage``; of equal moments the first."""
    index = {chunk: number for number, chunk in enumerate(schedule.chunks_of(stage))}
    counts, found = [0, 0] * schedule.chunks, dict[Moment, None]()
    for chunk, kind in schedule.passes(stage):
        number = index[chunk]
        if kind != FORWARD:
            found.setdefault(Moment(kind, number, not found, tuple(counts)))
        activations, deferred = _CHANGES[kind]
        counts[2 * number] += activations
        counts[2 * number + 1] += deferred
    return tuple(found)


_CHANGES = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT_GRADIENTS: (-1, 1), WEIGHT_GRADIENTS: (0, -1)}
"""What a pass adds to the counts of its chunk."""


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
