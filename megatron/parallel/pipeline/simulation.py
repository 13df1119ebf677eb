"""Simulates a pipeline schedule: times of passes, and activations in flight. No torch here.

Each pass starts as soon as its stage is free and its inputs have arrived.
"""

from collections.abc import Sequence
from functools import lru_cache
from operator import add
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS, Action, Schedule

Output = tuple[int, bool, int]
"""Output of a pass: (model chunk, whether it is a forward pass, micro-batch)."""


class PassSeconds(NamedTuple):
    """Seconds of each kind of pass through one model chunk."""

    forward: float = 1.0
    inputs: float = 1.0
    """Input gradients."""
    weights: float = 1.0
    """Weight gradients."""

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of pass."""
        return {
            FORWARD: self.forward,
            INPUT_GRADIENTS: self.inputs,
            WEIGHT_GRADIENTS: self.weights,
            BACKWARD: self.inputs + self.weights,
        }

    @property
    def total(self) -> float:
        """Seconds of all passes of a micro-batch."""
        return self.forward + self.inputs + self.weights


class TimedAction(NamedTuple):
    """A pass of a stage with its begin and end in seconds."""

    stage: int
    action: Action
    begin: float
    end: float


def simulate(schedule: Schedule, seconds: PassSeconds) -> list[TimedAction]:
    """All passes with their times, ordered by their end. Transfers take no time.

    Raises AssertionError if the stages of the schedule would wait for each other forever.
    """
    return sorted(timed(schedule, [seconds] * schedule.stages), key=lambda entry: (entry.end, entry.stage))


def timed(schedule: Schedule, seconds: Sequence[PassSeconds], transfer: float = 0.0) -> list[TimedAction]:
    """All passes with their times, for the ``seconds`` of each stage's passes and of a ``transfer`` between stages."""
    orders = [schedule.actions(stage) for stage in range(schedule.stages)]
    position, free = [0] * schedule.stages, [0.0] * schedule.stages
    ends: dict[Output, float] = {}
    waiting: dict[Output, int] = {}
    runnable = list(range(schedule.stages))
    timeline, durations = [], [stage_seconds.by_kind for stage_seconds in seconds]
    while runnable:
        stage = runnable.pop()
        while position[stage] < len(orders[stage]):
            action = orders[stage][position[stage]]
            needed = _needed(schedule, action)
            if needed is not None and needed not in ends:
                waiting[needed] = stage
                break
            begin = free[stage]
            if needed is not None:
                delay = 0.0 if schedule.stage_of(needed[0]) == stage else transfer
                begin = max(begin, ends[needed] + delay)
            free[stage] = begin + durations[stage][action.kind]
            timeline.append(TimedAction(stage, action, begin, free[stage]))
            position[stage] += 1
            if action.kind != WEIGHT_GRADIENTS:
                output = (action.chunk, action.kind == FORWARD, action.micro_batch)
                ends[output] = free[stage]
                if output in waiting:
                    runnable.append(waiting.pop(output))
    assert position == [len(order) for order in orders], f"the stages wait for each other: {schedule}"
    return timeline


def _needed(schedule: Schedule, action: Action) -> Output | None:
    """The output that a pass waits for."""
    if action.kind == FORWARD:
        return (action.chunk - 1, True, action.micro_batch) if action.chunk else None
    if action.kind == WEIGHT_GRADIENTS:
        return (action.chunk, False, action.micro_batch)
    is_last = action.chunk == schedule.stages * schedule.chunks - 1
    return (action.chunk + (not is_last), is_last, action.micro_batch)


Counts = tuple[int, ...]
"""For each model chunk of a stage in order: number of micro-batches with activations, and with tensors kept for W."""


class Moment(NamedTuple):
    """A pass B, I or W, and what its stage keeps before it."""

    kind: str
    chunk: int
    """Index of the chunk on its stage, from 0."""
    is_first: bool
    """Whether it is the first backward pass of the stage, before which there are no weight gradients."""
    counts: Counts


def in_flight(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Micro-batches with kept activations for each chunk of a stage, at the moment with the largest sum."""
    return max(counts_in_flight(schedule, stage), key=sum)


@lru_cache(maxsize=4096)
def counts_in_flight(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """Distinct counts of forward passes without their B or W yet, for each chunk of a stage, before every B, I or W."""
    all_counts = (moment.counts for moment in moments(schedule, stage))
    return tuple(dict.fromkeys(tuple(map(add, counts[::2], counts[1::2])) for counts in all_counts))


@lru_cache(maxsize=4096)
def moments(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    """The distinct moments of ``stage``: before every B, I and W."""
    index = {chunk: number for number, chunk in enumerate(schedule.chunks_of(stage))}
    counts, distinct = [0, 0] * schedule.chunks, dict[Moment, None]()
    for chunk, kind in schedule.passes(stage):
        number = index[chunk]
        if kind != FORWARD:
            distinct.setdefault(Moment(kind, number, not distinct, tuple(counts)))
        activations, deferred = _CHANGES[kind]
        counts[2 * number] += activations
        counts[2 * number + 1] += deferred
    return tuple(distinct)


_CHANGES = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT_GRADIENTS: (-1, 1), WEIGHT_GRADIENTS: (0, -1)}
"""Pass to the change of both counts of its chunk."""
