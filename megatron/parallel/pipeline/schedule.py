"""Pipeline schedules: the forward and backward passes of each stage in order. No torch here.

The model is a sequence of *model chunks*, numbered from 0. Each of the p stages holds v chunks:

- ``1f1b``: v = 1; alternates forward and backward passes (arXiv 2104.04473, section 2.2).
- ``interleaved``: v >= 2, chunk c on stage c % p (same section).
- ``zbh1``: v = 1; splits the backward pass and fills the bubble with weight gradients; no more memory than 1F1B
  (ZB-H1 of arXiv 2401.10241, section 2).
- ``zbv``: v = 2, chunks in the shape of a V: stage s holds chunks s and 2 p - 1 - s (same paper, section 6).
- ``dualpipev``: the same V; pairs of forward and full backward passes of different micro-batches (arXiv 2412.19437,
  folded).

A backward pass B computes the gradients of a chunk's inputs and weights. A schedule may split it into I, the input
gradients, which the previous chunk waits for, and W, the weight gradients, which no stage waits for. The result of I is
sent before W, even if W follows immediately: with both in one pass the bubble of ``zbv`` is three times as long.
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
"""(chunk, kind) of passes in order; each pass takes the next micro-batch of its chunk."""


class Instruction(NamedTuple):
    """One pipeline instruction of a rank, with DeepSpeed's name."""

    name: str
    micro_batch: int | None = None
    """Number of the micro-batch, from 1; None for an instruction once per batch."""
    phase: int | None = None
    """Index of the model chunk on its stage, from 0, if a stage has several."""

    def __str__(self) -> str:
        text = self.name if self.micro_batch is None else f"{self.name} of micro-batch {self.micro_batch}"
        return text if self.phase is None else f"{text} in chunk {self.phase} of its stage"


InstructionHook = Callable[[Instruction], AbstractContextManager]
"""Called before each instruction of an engine; the instruction runs inside the returned context."""

FORWARD, BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS = "F", "B", "I", "W"
"""Kinds of passes."""


class Action(NamedTuple):
    """A pass of a micro-batch through a model chunk."""

    chunk: int
    """Number of the model chunk, from 0."""
    kind: str
    """F, B, I or W."""
    micro_batch: int
    """Number of the micro-batch, from 0."""

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"  # notation of torch.distributed.pipelining


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule for one batch: the passes of all stages."""

    name: str
    stages: int
    micro_batches: int
    chunks: int = 1
    """Model chunks per stage."""

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
        """The passes of a stage in order."""
        return KINDS[self.name].order(self, stage)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """The passes of a stage in order, with their micro-batches."""
        return _actions(self, stage)

    @property
    def divides_backward(self) -> bool:
        """Whether the backward pass is split into I and W."""
        return KINDS[self.name].splits_backward

    @cached_property
    def shortened(self) -> "Schedule":
        """The schedule with the fewest micro-batches that has the same idle time and passes in flight."""
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
    """Number the micro-batches of passes."""
    done: Counter[tuple[int, str]] = Counter()
    for chunk, kind in passes:
        parts = INPUT_GRADIENTS + WEIGHT_GRADIENTS if kind == BACKWARD else kind
        yield Action(chunk, kind, done[chunk, parts[0]])
        for part in parts:
            done[chunk, part] += 1


def _one_forward_one_backward(schedule: Schedule, stage: int) -> Passes:
    """1F1B, interleaved or not: warm-up forward passes, alternating forward and backward passes, cool-down.

    Micro-batches run through the chunks of a stage in equal rounds of ``per_round``, about p.
    """
    chunks, stage_chunks = schedule.chunks, schedule.chunks_of(stage)
    count, later = chunks * schedule.micro_batches, schedule.stages - 1 - stage
    per_round = schedule.micro_batches // rounds(schedule.stages, schedule.micro_batches)
    warmup = min((chunks - 1) * per_round + (later if chunks == 1 else 2 * later), count)
    forward_order = [stage_chunks[number // per_round % chunks] for number in range(count)]
    passes = [(chunk, FORWARD) for chunk in forward_order[:warmup]]
    backward_order = [stage_chunks[-1 - number // per_round % chunks] for number in range(count)]
    for number, chunk in enumerate(backward_order):
        if warmup + number < count:
            passes.append((forward_order[warmup + number], FORWARD))
        passes.append((chunk, BACKWARD))
    return passes


def _zbh1(schedule: Schedule, stage: int) -> Passes:
    """ZB-H1: 1F1B with split backward, in which stage s delays W by s micro-batches."""
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
    """ZB-V, which has no bubble if F, I and W take equally long."""
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
    # With fewer micro-batches than ``count``, leave out the passes of micro-batches that do not exist.
    exists = (action.micro_batch < schedule.micro_batches for action in _numbered(passes))
    return passes if count == schedule.micro_batches else list(compress(passes, exists))


def _dualpipev(schedule: Schedule, stage: int) -> Passes:
    """DualPipeV; the two passes of a pair run one after the other."""
    out, back = schedule.chunks_of(stage)
    f0, b0, f1, b1 = (out, FORWARD), (out, BACKWARD), (back, FORWARD), (back, BACKWARD)
    later, last = schedule.stages - 1 - stage, stage + 1
    steady = schedule.micro_batches - 2 * schedule.stages + last
    return [
        *[f0] * (2 * later), *[f0, f1] * last, *[b1, f1] * later, *[f0, b1, f1, b0] * steady,
        *[b1, f1, b0] * later, *[b1, b0] * last, *[b0] * later,
    ]  # fmt: skip


class Kind(NamedTuple):
    """Properties of a kind of schedule."""

    order: Callable[[Schedule, int], Passes]
    chunks: int | None
    """Model chunks per stage; None for 2 or more."""
    is_v: bool
    """Whether every second row of chunks runs from the last stage to the first."""
    splits_backward: bool
    """Whether the backward pass is split into I and W."""


KINDS = {
    "1f1b": Kind(_one_forward_one_backward, 1, False, False),
    "interleaved": Kind(_one_forward_one_backward, None, False, False),
    "zbh1": Kind(_zbh1, 1, False, True),
    "zbv": Kind(_zbv, 2, True, True),
    "dualpipev": Kind(_dualpipev, 2, True, False),
}
"""The schedules by name."""


def schedule_of(run: RunConfig) -> Schedule:
    """The schedule of ``run``, whose batch sizes must be known."""
    return schedule_with(run.parallel, run.train.gradient_accumulation_steps)


def schedule_with(parallel: ParallelConfig, micro_batches: int) -> Schedule:
    """The schedule of ``parallel``."""
    return _schedule(parallel.pipeline_schedule, parallel.pipe_stages, micro_batches, parallel.chunks_per_stage)


_schedule = lru_cache(maxsize=4096)(Schedule)


def rounds(stages: int, micro_batches: int) -> int:
    """Number of rounds of the interleaved schedule, each of at least ``stages`` micro-batches."""
    return max(1, micro_batches // stages)


def has_order(name: str, stages: int, micro_batches: int, chunks: int) -> bool:
    """Whether the schedule exists for these sizes.

    ``interleaved`` needs rounds of equal size, ``dualpipev`` at least two micro-batches per stage.
    """
    known = KINDS[name].chunks
    if (chunks < 2 if known is None else chunks != known) or stages < 1 or micro_batches < 1:
        return False
    if name == "interleaved":
        return micro_batches % rounds(stages, micro_batches) == 0
    return name != "dualpipev" or micro_batches >= 2 * stages
