"""What one stage does for a batch: its passes, and the transfers between them. No torch here.

Ranks that wait for one another in different orders would hang. So the transfers of all stages are ordered by the time
at which the pass before each would end if every part of a pass took equally long. Both ends of a transfer start it at
that time, after their own passes that are finished by then, together with their other transfers of that time. A stage
that waits for a transfer waits for passes and transfers of earlier times only, so that no circle of stages can wait
for each other, even if a transfer begins only when both ends have started it.
"""

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import FORWARD, WEIGHT_GRADIENTS, Action, Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, simulate


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


Step = Action | tuple[Transfer, ...]
"""A pass, or transfers that are started together."""


@lru_cache(maxsize=64)
def program(schedule: Schedule, stage: int, forward_only: bool = False) -> tuple[Step, ...]:
    """The passes and transfers of ``stage`` in order; with ``forward_only`` for an evaluation."""
    timed = simulate(schedule, PassSeconds())
    if forward_only:
        timed = [one for one in timed if one.action.kind == FORWARD]
    steps: list[Step] = []
    for _, ending in groupby(timed, key=lambda one: one.end):
        transfers: list[Transfer] = []
        for one in ending:
            if one.stage == stage:
                steps.append(one.action)
            transfers += _ends_at(stage, schedule, one.action)
        if transfers:
            steps.append(tuple(transfers))
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
