"""A schedule in time, and its bubble: each pass as early as its stage and the passes before it allow. No torch here."""

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
    return sorted(_timed(schedule, seconds), key=lambda one: (one.end, one.stage))


def _timed(schedule: Schedule, seconds: PassSeconds) -> list[TimedAction]:
    orders = [schedule.actions(stage) for stage in range(schedule.stages)]
    position, free = [0] * schedule.stages, [0.0] * schedule.stages
    ends: dict[Output, float] = {}
    waiting: dict[Output, int] = {}
    runnable = list(range(schedule.stages))
    timed, durations = [], seconds.by_kind
    while runnable:
        stage = runnable.pop()
        while position[stage] < len(orders[stage]):
            action = orders[stage][position[stage]]
            needed = _needed(schedule, action)
            if needed is not None and needed not in ends:
                waiting[needed] = stage
                break
            begin = max(free[stage], 0.0 if needed is None else ends[needed])
            free[stage] = begin + durations[action.kind]
            timed.append(TimedAction(stage, action, begin, free[stage]))
            position[stage] += 1
            if action.kind != WEIGHT_GRADIENTS:
                output = (action.chunk, action.kind == FORWARD, action.micro_batch)
                ends[output] = free[stage]
                if output in waiting:
                    runnable.append(waiting.pop(output))
    assert position == [len(order) for order in orders], f"the stages wait for each other: {schedule}"
    return timed


def _needed(schedule: Schedule, action: Action) -> Output | None:
    """The output that a pass waits for."""
    if action.kind == FORWARD:
        return (action.chunk - 1, True, action.micro_batch) if action.chunk else None
    if action.kind == WEIGHT_GRADIENTS:
        return (action.chunk, False, action.micro_batch)
    is_last = action.chunk == schedule.stages * schedule.chunks - 1
    return (action.chunk + (not is_last), is_last, action.micro_batch)


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
    return max(one.end for one in _timed(short, seconds)) - useful


def bubble_ratio(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over useful time of 1F1B, and with several ``chunks`` to a stage of the interleaved schedule.

    (p - 1) / (v m), if all passes of a kind take equally long (arXiv 2104.04473, section 2.2).
    """
    return (stages - 1) / (chunks * micro_batches)


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time of these pipelines over their time: (p - 1) / (v m + p - 1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)
