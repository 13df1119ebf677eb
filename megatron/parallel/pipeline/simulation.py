"""A schedule in time: what a stage sends and receives between its passes, and what it keeps. No torch here.

Each pass begins as early as its stage and the passes before it allow.
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
"""What a pass hands on: its model chunk, whether it is a forward pass, and the micro-batch."""


class PassSeconds(NamedTuple):
    """Seconds of each kind of pass through one model chunk."""

    forward: float = 1.0
    inputs: float = 1.0
    """Gradients of the inputs."""
    weights: float = 1.0
    """Gradients of the weights."""

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
        """All passes of a micro-batch."""
        return self.forward + self.inputs + self.weights


class TimedAction(NamedTuple):
    """A pass of a stage in time."""

    stage: int
    action: Action
    begin: float
    end: float


def simulate(schedule: Schedule, seconds: PassSeconds) -> list[TimedAction]:
    """All passes in time, ordered by their end. Transfers take no time.

    A schedule whose stages would wait for each other forever is a mistake of ours, and an AssertionError.
    """
    return sorted(timed(schedule, [seconds] * schedule.stages), key=lambda one: (one.end, one.stage))


def timed(schedule: Schedule, seconds: Sequence[PassSeconds], transfer: float = 0.0) -> list[TimedAction]:
    """All passes in time: ``seconds`` of each stage's passes, and of a ``transfer`` between stages."""
    orders = [schedule.actions(stage) for stage in range(schedule.stages)]
    position, free = [0] * schedule.stages, [0.0] * schedule.stages
    ends: dict[Output, float] = {}
    waiting: dict[Output, int] = {}
    runnable = list(range(schedule.stages))
    found, durations = [], [one.by_kind for one in seconds]
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
            found.append(TimedAction(stage, action, begin, free[stage]))
            position[stage] += 1
            if action.kind != WEIGHT_GRADIENTS:
                output = (action.chunk, action.kind == FORWARD, action.micro_batch)
                ends[output] = free[stage]
                if output in waiting:
                    runnable.append(waiting.pop(output))
    assert position == [len(order) for order in orders], f"the stages wait for each other: {schedule}"
    return found


def _delay(schedule: Schedule, needed: Output, stage: int, transfer: float) -> float:
    """Seconds until an output is on ``stage``."""
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
    """One end of a transfer of what a pass has computed to the stage of the next pass."""

    is_send: bool
    is_forward: bool
    """Whether it carries outputs, not gradients of inputs."""
    chunk: int
    """The model chunk of this end."""
    micro_batch: int
    """From 0 on."""
    stage: int
    """The stage of the other end."""

    @property
    def boundary(self) -> int:
        """The model chunk before the boundary that it crosses."""
        return self.chunk if self.is_send == self.is_forward else self.chunk - 1


Step = Action | Transfer
"""A pass, or an end of a transfer that is started."""


@lru_cache(maxsize=64)
def program(
    schedule: Schedule, stage: int, forward_only: bool = False, receives_early: bool = True
) -> tuple[Step, ...]:
    """The passes and transfers of ``stage`` in order; with ``forward_only`` for an evaluation.

    Ranks that wait for one another in different orders would hang. So the transfers of all stages are ordered by the
    time at which the pass before each would end if every part of a pass took equally long. Both ends of a transfer
    start it at that time: a stage starts to receive before its own passes that end then, and to send after them. It
    waits for a transfer only before the pass that needs it, so for passes and transfers of earlier times only, and no
    circle of stages can wait for each other, even if a transfer begins only when both ends have started it.

    Unless it ``receives_early``, all transfers of a time follow the passes, in the same order on all stages, so that a
    stage may wait for each of them.
    """
    passes = simulate(schedule, PassSeconds())
    if forward_only:
        passes = [one for one in passes if one.action.kind == FORWARD]
    steps: list[Step] = []
    for _, group in groupby(passes, key=lambda one: one.end):
        ending = list(group)
        transfers = [end for one in ending for end in _ends_at(stage, schedule, one.action)]
        early = [end for end in transfers if receives_early and not end.is_send]
        steps += early
        steps += [one.action for one in ending if one.stage == stage]
        steps += [end for end in transfers if end not in early]
    return tuple(steps)


def _ends_at(stage: int, schedule: Schedule, action: Action) -> list[Transfer]:
    """The end at ``stage`` of the transfer after ``action``, if there is one."""
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
    counts = (moment.counts for moment in moments(schedule, stage))
    return tuple(dict.fromkeys(tuple(map(add, one[::2], one[1::2])) for one in counts))


@lru_cache(maxsize=4096)
def moments(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
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
