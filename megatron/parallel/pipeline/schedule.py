"""The 1F1B pipeline schedule and its bubble. No torch here.

With one forward and one backward pass at a time (1F1B) every pass takes one slot. Stage s of p, from 0 on, runs
micro-batch k of m, from 1 on, forward in slot s + 2 (k - 1) and backward in slot 2 p - 1 - s + 2 (k - 1), so that a
batch takes 2 (m + p - 1) slots, of which each stage idles in 2 (p - 1).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple


class Instruction(NamedTuple):
    """One step of a rank, under DeepSpeed's name for it."""

    name: str
    micro_batch: int | None = None
    """From 1 on; None for what is done once per batch."""
    phase: int | None = None
    """With DualPipeV: 0 on the way out through the stages, 1 on the way back."""

    def __str__(self) -> str:
        return self.name if self.micro_batch is None else f"{self.name} of micro-batch {self.micro_batch}"


InstructionHook = Callable[[Instruction], AbstractContextManager]
"""Called before each instruction of an engine, which then runs inside the context that the hook returns."""


class Pass(NamedTuple):
    """A forward or backward pass in its slot."""

    slot: int
    micro_batch: int
    is_forward: bool


class TimedPass(NamedTuple):
    """A forward or backward pass of a stage in time."""

    stage: int
    micro_batch: int
    is_forward: bool
    begin: float
    end: float


def bubble_ratio(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time of a pipeline over its useful time, with ``chunks`` of the model to a stage (arXiv 2104.04473, 2.2).

    (p - 1) / (v m), if all passes of a kind take equally long.
    """
    return (stages - 1) / (chunks * micro_batches)


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time of a pipeline over all of its time: (p - 1) / (v m + p - 1)."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def micro_batches_in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Micro-batches whose activations a stage keeps at a time, counted from 0."""
    return min(micro_batches, stages - stage)


def passes(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """The passes of a stage in the order of their slots."""
    forward = [Pass(stage + 2 * number, number + 1, True) for number in range(micro_batches)]
    backward = [Pass(2 * stages - 1 - stage + 2 * number, number + 1, False) for number in range(micro_batches)]
    return sorted(forward + backward)


def timed_passes(stages: int, micro_batches: int, forward: float, backward: float) -> list[TimedPass]:
    """All passes in time, each as early as its dependencies allow; passes take ``forward`` and ``backward``."""
    in_slots = sorted((one.slot, stage, one) for stage in range(stages) for one in passes(stage, stages, micro_batches))
    free = [0.0] * stages
    ends: dict[tuple[int, int, bool], float] = {}
    timed = []
    for _, stage, (_, number, is_forward) in in_slots:
        before = stage - 1 if is_forward else stage + 1
        begin = max(free[stage], ends.get((before, number, is_forward), 0.0))
        free[stage] = ends[stage, number, is_forward] = begin + (forward if is_forward else backward)
        timed.append(TimedPass(stage, number, is_forward, begin, free[stage]))
    return timed
