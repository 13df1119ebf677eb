"""Pipeline schedules: the passes that each stage runs, and their order. No torch here.

The model is a row of *model chunks*, numbered from 0 on in its order. Each of the p stages holds v of them:

- ``1f1b``: v = 1. One forward and one backward pass in turn (arXiv 2104.04473, section 2.2).
- ``interleaved``: v of 2 or more, chunk c on stage c % p (the same section).
- ``zbh1``: v = 1, the backward pass in two parts, of which the second fills the bubble; no more memory than 1F1B
  (ZB-H1 of arXiv 2401.10241, section 2).
- ``zbv``: v = 2, the chunks in the shape of a V: stage s holds chunks s and 2 p - 1 - s (the same paper, section 6).
- ``dualpipev``: the same V; forward and full backward passes of different micro-batches in pairs (arXiv 2412.19437,
  folded).

A backward pass B computes the gradients of a chunk's inputs and weights. A schedule may divide it into I, the gradients
of the inputs, for which the previous chunk waits, and W, the gradients of the weights, for which no stage waits. I is
sent on before W, even where W follows at once: with both in one pass the bubble of ``zbv`` is three times as long.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import compress
from typing import NamedTuple

from megatron.config import ParallelConfig, RunConfig

Passes = list[tuple[int, str]]
"""Chunk and kind of passes in order; each takes the next micro-batch of its chunk."""


class Instruction(NamedTuple):
    """One step of a rank, under DeepSpeed's name for it."""

    name: str
    micro_batch: int | None = None
    """From 1 on; None for what is done once per batch."""
    phase: int | None = None
    """With several model chunks to a stage: which of them, from 0 on in the order of the model."""

    def __str__(self) -> str:
        text = self.name if self.micro_batch is None else f"{self.name} of micro-batch {self.micro_batch}"
        return text if self.phase is None else f"{text} in chunk {self.phase} of its stage"


InstructionHook = Callable[[Instruction], AbstractContextManager]
"""Called before each instruction of an engine, which then runs inside the context that the hook returns."""

FORWARD, BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS = "F", "B", "I", "W"
"""Kinds of passes."""


class Action(NamedTuple):
    """A pass of a micro-batch through a model chunk."""

    chunk: int
    """Number of the model chunk in the model."""
    kind: str
    """F, B, I or W."""
    micro_batch: int
    """From 0 on."""

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"  # as torch.distributed.pipelining writes it


@dataclass(frozen=True)
class Schedule:
    """The passes of all stages for one batch."""

    name: str
    stages: int
    micro_batches: int
    chunks: int = 1
    """Model chunks of a stage."""

    def __post_init__(self) -> None:
        assert has_order(self.name, self.stages, self.micro_batches, self.chunks), self

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a model chunk."""
        row, column = divmod(chunk, self.stages)
        return self.stages - 1 - column if row % 2 and KINDS[self.name].is_v else column

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The model chunks of a stage, in the order of the model."""
        return chunks_of(self.name, stage, self.stages, self.chunks)

    def passes(self, stage: int) -> Passes:
        """The passes of a stage in their order."""
        return KINDS[self.name].order(self, stage)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """The same with their micro-batches."""
        return _actions(self, stage)

    @property
    def divides_backward(self) -> bool:
        """Whether there are passes I and W."""
        return KINDS[self.name].splits_backward

    @cached_property
    def shortened(self) -> "Schedule":
        """The same with the fewest micro-batches that have the same idle seconds and passes in flight."""
        if self.micro_batches <= 4 * self.stages:
            return self
        per_round = self.micro_batches // rounds(self.stages, self.micro_batches)
        return replace(self, micro_batches=3 * per_round)


def chunks_of(name: str, stage: int, stages: int, chunks: int) -> tuple[int, ...]:
    """The model chunks of a stage with the schedule ``name``, in the order of the model."""
    is_v = KINDS[name].is_v
    return tuple(row * stages + (stages - 1 - stage if row % 2 and is_v else stage) for row in range(chunks))


@lru_cache(maxsize=256)
def _actions(schedule: Schedule, stage: int) -> tuple[Action, ...]:
    return tuple(_numbered(schedule.passes(stage)))


def _numbered(passes: Passes) -> Iterator[Action]:
    """The passes with their micro-batches."""
    done: Counter[tuple[int, str]] = Counter()
    for chunk, kind in passes:
        counted = INPUT_GRADIENTS + WEIGHT_GRADIENTS if kind == BACKWARD else kind
        yield Action(chunk, kind, done[chunk, counted[0]])
        for one in counted:
            done[chunk, one] += 1


def _one_forward_one_backward(schedule: Schedule, stage: int) -> Passes:
    """1F1B, interleaved or not: some forward passes, then one forward and one backward pass in turn, then the rest.

    Micro-batches go through the chunks of a stage in rounds of about p, which ``per_round`` divides evenly.
    """
    chunks, own = schedule.chunks, schedule.chunks_of(stage)
    count, later = chunks * schedule.micro_batches, schedule.stages - 1 - stage
    per_round = schedule.micro_batches // rounds(schedule.stages, schedule.micro_batches)
    ahead = min((chunks - 1) * per_round + (later if chunks == 1 else 2 * later), count)
    order = [own[number // per_round % chunks] for number in range(count)]
    passes = [(chunk, FORWARD) for chunk in order[:ahead]]
    back = [own[-1 - number // per_round % chunks] for number in range(count)]
    for number, chunk in enumerate(back):
        if ahead + number < count:
            passes.append((order[ahead + number], FORWARD))
        passes.append((chunk, BACKWARD))
    return passes


def _zbh1(schedule: Schedule, stage: int) -> Passes:
    """1F1B, with W of a micro-batch after I of the one that is as many later as there are stages before this one."""
    passes: Passes = []
    started = 0
    for chunk, kind in _one_forward_one_backward(schedule, stage):
        if kind == FORWARD:
            passes.append((chunk, FORWARD))
            continue
        passes.append((chunk, INPUT_GRADIENTS))
        started += 1
        if started > stage:
            passes.append((chunk, WEIGHT_GRADIENTS))
    return passes + [(stage, WEIGHT_GRADIENTS)] * min(stage, schedule.micro_batches)


def _zbv(schedule: Schedule, stage: int) -> Passes:
    """ZB-V: all passes of each micro-batch, in an order that leaves no bubble if F, I and W take equally long."""
    out, back = schedule.chunks_of(stage)
    f0, i0, w0 = ((out, kind) for kind in "FIW")
    f1, i1, w1 = ((back, kind) for kind in "FIW")
    to_turn = schedule.stages - stage
    count = max(schedule.micro_batches, 2 * schedule.stages - 1)
    steady = count - schedule.stages
    with_f0 = count - (2 * to_turn - 1) - stage
    passes = [
        *[f0] * (2 * to_turn - 1), *[f1, f0] * stage, *[f1, i1, w1] * to_turn,
        *[f0, i0, w0, f1, i1, w1] * with_f0, *[i0, w0, f1, i1, w1] * (steady - with_f0),
        *[i0, i1] * stage, *[i0, w0] * to_turn, *[w1] * stage, *[w0] * stage,
    ]  # fmt: skip
    # With fewer micro-batches than that, passes of micro-batches that do not exist are left out.
    there = (action.micro_batch < schedule.micro_batches for action in _numbered(passes))
    return passes if count == schedule.micro_batches else list(compress(passes, there))


def _dualpipev(schedule: Schedule, stage: int) -> Passes:
    """DualPipeV in its steps; a pair of a forward and a backward pass is the one after the other."""
    out, back = schedule.chunks_of(stage)
    f0, b0, f1, b1 = (out, FORWARD), (out, BACKWARD), (back, FORWARD), (back, BACKWARD)
    later, last = schedule.stages - 1 - stage, stage + 1
    steady = schedule.micro_batches - 2 * schedule.stages + last
    return [
        *[f0] * (2 * later), *[f0, f1] * last, *[b1, f1] * later, *[f0, b1, f1, b0] * steady,
        *[b1, f1, b0] * later, *[b1, b0] * last, *[b0] * later,
    ]  # fmt: skip


class Kind(NamedTuple):
    """What distinguishes a schedule."""

    order: Callable[[Schedule, int], Passes]
    chunks: int | None
    """Model chunks of a stage; None: 2 or more."""
    is_v: bool
    """Whether every second row of chunks runs back from the last stage to the first."""
    splits_backward: bool
    """Whether there are I and W."""


KINDS = {
    "1f1b": Kind(_one_forward_one_backward, 1, False, False),
    "interleaved": Kind(_one_forward_one_backward, None, False, False),
    "zbh1": Kind(_zbh1, 1, False, True),
    "zbv": Kind(_zbv, 2, True, True),
    "dualpipev": Kind(_dualpipev, 2, True, False),
}
"""The schedules by name."""


def schedule_of(run: RunConfig) -> Schedule:
    """The schedule of ``run``, whose batch is known."""
    return schedule_with(run.parallel, run.train.gradient_accumulation_steps)


def schedule_with(parallel: ParallelConfig, micro_batches: int) -> Schedule:
    """The schedule of ``parallel``."""
    return _schedule(parallel.pipeline_schedule, parallel.pipe_stages, micro_batches, parallel.chunks_per_stage)


_schedule = lru_cache(maxsize=4096)(Schedule)


def rounds(stages: int, micro_batches: int) -> int:
    """Into how many rounds the interleaved schedule divides the micro-batches, each of as many as stages, or more."""
    return max(1, micro_batches // stages)


def has_order(name: str, stages: int, micro_batches: int, chunks: int) -> bool:
    """Whether there is such a schedule.

    ``interleaved`` needs rounds of equally many micro-batches, ``dualpipev`` two micro-batches for each stage.
    """
    known = KINDS[name].chunks
    if (chunks < 2 if known is None else chunks != known) or stages < 1 or micro_batches < 1:
        return False
    if name == "interleaved":
        return micro_batches % rounds(stages, micro_batches) == 0
    return name != "dualpipev" or micro_batches >= 2 * stages
