"""The program of a pipeline stage: the passes of its schedule, and the transfers between them. No torch here."""

from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import FORWARD, WEIGHT_GRADIENTS, Action, Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, simulate


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
