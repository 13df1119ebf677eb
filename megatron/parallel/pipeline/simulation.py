"""Simulates a pipeline schedule: times of passes, transfers between stages, activations in flight. No torch here.

Each pass starts as soon as its stage is free and its inputs have arrived.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from operator import add
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENTS,
    WEIGHT_GRADIENTS,
    Action,
    Schedule,
)

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
            begin = max(
                free[stage], 0.0 if needed is None else ends[needed] + _delay(schedule, needed, stage, transfer)
            )
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


def _delay(schedule: Schedule, needed: Output, stage: int, transfer: float) -> float:
    """Seconds of the transfer of an output to ``stage``."""
    return 0.0 if schedule.stage_of(needed[0]) == stage else transfer


def _needed(schedule: Schedule, action: Action) -> Output | None:
    """The output that a pass waits for."""
    if action.kind == FORWARD:
        return (action.chunk - 1, True, action.micro_batch) if action.chunk else None
    if action.kind == WEIGHT_GRADIENTS:
        return (action.chunk, False, action.micro_batch)
    is_last = action.chunk == schedule.stages * schedule.chunks - 1
    return (action.chunk + (not is_last), is_last, action.micro_batch)


class Transfer(NamedTuple):
    """One end (send or receive) of a transfer of a pass's output to another stage."""

    is_send: bool
    is_forward: bool
    """Whether activations are transferred, not gradients."""
    chunk: int
    """The model chunk at this end."""
    micro_batch: int
    """Number of the micro-batch, from 0."""
    stage: int
    """The stage at the other end."""

    @property
    def boundary(self) -> int:
        """The model chunk before the chunk boundary that the transfer crosses."""
        return self.chunk if self.is_send == self.is_forward else self.chunk - 1


Step = Action | Transfer
"""A pass, or the start of one end of a transfer."""


@lru_cache(maxsize=64)
def program(
    schedule: Schedule, stage: int, forward_only: bool = False, receives_early: bool = True
) -> tuple[Step, ...]:
    """The passes and transfers of ``stage`` in order; ``forward_only`` for an evaluation.

    To avoid deadlocks, the transfers of all stages are ordered by the simulated end of the pass whose output they
    transfer, with passes F, I and W of equal length. Both ends start a transfer at that time: a stage starts to receive
    before its own passes that end then, and to send after them. It waits for a transfer only before the pass that needs
    it, and so only for passes and transfers of earlier times. No cycle of stages can wait for each other, even if a
    transfer begins only when both ends have started it.

    Without ``receives_early``, all transfers of a time follow the passes, in the same order on all stages, so that a
    stage may wait for each of them immediately.
    """
    passes = simulate(schedule, PassSeconds())
    if forward_only:
        passes = [entry for entry in passes if entry.action.kind == FORWARD]
    steps: list[Step] = []
    for _, group in groupby(passes, key=lambda entry: entry.end):
        ending = list(group)
        transfers = [end for entry in ending for end in _ends_at(stage, schedule, entry.action)]
        early = [end for end in transfers if receives_early and not end.is_send]
        steps += early
        steps += [entry.action for entry in ending if entry.stage == stage]
        steps += [end for end in transfers if end not in early]
    return tuple(steps)


def _ends_at(stage: int, schedule: Schedule, action: Action) -> list[Transfer]:
    """The end on ``stage`` of the transfer after ``action``, if there is one."""
    if action.kind == WEIGHT_GRADIENTS:
        return []
    is_forward = action.kind == FORWARD
    receiving = action.chunk + (1 if is_forward else -1)
    if not 0 <= receiving < schedule.stages * schedule.chunks:
        return []
    source, target = schedule.stage_of(action.chunk), schedule.stage_of(receiving)
    if source == target or stage not in (source, target):
        return []
    if stage == source:
        return [Transfer(True, is_forward, action.chunk, action.micro_batch, target)]
    return [Transfer(False, is_forward, receiving, action.micro_batch, source)]


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
