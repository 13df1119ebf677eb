"""Pipeline schedules: the passes that each stage runs, and their order. No torch here.

The model is a row of *model chunks*, numbered from 0 on in its order. Each of the p stages holds v of them:

- ``1f1b``: v = 1. One forward and one backward pass in turn (arXiv 2104.04473, section 2.2).
- ``interleaved``: v of 2 or more, chunk c on stage c % p (the same section).
- ``zbh1``: v = 1, the backward pass in two parts, of which the second fills the bubble; no more memory than 1F1B
  (ZB-H1 of arXiv 2401.10241, section 2).
- ``zbv``: v = 2, the chunks in the shape of a V: stage s holds chunks s and 2 p - 1 - s (the same paper, section 6).
- ``dualpipev``: the same V; forward and backward passes of different micro-batches in pairs (arXiv 2412.19437, folded).

A backward pass B computes the gradients of a chunk's inputs and weights. A schedule may divide it into I, the gradients
of the inputs, for which the previous chunk waits, and W, those of the weights, for which no stage waits. I is sent on
before W, even where W follows at once: with both in one pass the bubble of ``zbv`` is three times as long.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from megatron.config import RunConfig


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
    """Number of the model chunk in the whole model."""
    kind: str
    """F, B, I or W."""
    micro_batch: int
    """From 0 on."""

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"  # as torch.distributed.pipelining writes it


class Held(NamedTuple):
    """Micro-batches of which a stage keeps tensors for one of its model chunks."""

    forward: int
    """Of these its activations."""
    products: int
    """Of these what W is computed from, after I."""


class Moment(NamedTuple):
    """What a stage keeps before a pass that is not a forward pass."""

    kind: str
    """Of the pass."""
    phase: int
    """Of its model chunk, among those of the stage."""
    held: tuple[Held, ...]
    """For each chunk of the stage."""
    is_first: bool = False
    """Whether no backward pass of the stage has run yet, so that there are no gradients of its weights."""


@dataclass(frozen=True)
class Schedule:
    """The passes of all stages for one batch."""

    name: str
    stages: int
    micro_batches: int
    chunks: int = 1
    """Model chunks of a stage."""
    splits_backward: bool = True
    """False: the same order with B in place of I, and no W, as DeepSpeed runs DualPipeV."""

    def __post_init__(self) -> None:
        assert has_order(self.name, self.stages, self.micro_batches, self.chunks), self

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a model chunk."""
        turn, place = divmod(chunk, self.stages)
        return self.stages - 1 - place if turn % 2 and KINDS[self.name].is_v else place

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """The model chunks of a stage, in the order of the model."""
        return chunks_of(self.name, stage, self.stages, self.chunks)

    def actions(self, stage: int) -> tuple[Action, ...]:
        """The passes of a stage in their order."""
        return _actions(self, stage)

    @property
    def divides_backward(self) -> bool:
        """Whether there are I and W."""
        return self.splits_backward and KINDS[self.name].splits_backward

    def in_flight(self, stage: int) -> tuple[int, ...]:
        """Of each chunk of a stage: forward passes whose activations are kept at a time, when most of them are."""
        return max(self.kept(stage), key=sum)

    def kept(self, stage: int) -> tuple[tuple[int, ...], ...]:
        """For each chunk of a stage: forward passes whose B or W is not done; all counts before a B, I or W."""
        return tuple(dict.fromkeys(tuple(map(sum, moment.held)) for moment in self.moments(stage)))

    def moments(self, stage: int) -> tuple[Moment, ...]:
        """What a stage keeps before each B, I and W; all that occur, each once."""
        return _moments(self, stage)

    def most_in_flight(self, stage: int) -> int:
        """Micro-batches of which a stage keeps tensors at a time, at most, in the mean over its chunks."""
        return _most_in_flight(self, stage)

    @property
    def shortened(self) -> "Schedule":
        """The same with as few micro-batches as have the same seconds of idle time, and as many passes in flight."""
        if self.micro_batches <= 4 * self.stages:
            return self
        per_round = self.micro_batches // rounds(self.stages, self.micro_batches)
        return replace(self, micro_batches=3 * per_round)


def chunks_of(name: str, stage: int, stages: int, chunks: int) -> tuple[int, ...]:
    """The model chunks of a stage with the schedule ``name``, in the order of the model."""
    is_v = KINDS[name].is_v
    return tuple(turn * stages + (stages - 1 - stage if turn % 2 and is_v else stage) for turn in range(chunks))


@lru_cache(maxsize=256)
def _actions(schedule: Schedule, stage: int) -> tuple[Action, ...]:
    passes = KINDS[schedule.name].order(schedule, stage)
    return tuple(_numbered(passes if schedule.splits_backward else _whole(passes), schedule.micro_batches))


@lru_cache(maxsize=4096)
def _moments(schedule: Schedule, stage: int) -> tuple[Moment, ...]:
    own = schedule.chunks_of(stage)
    held = [Held(0, 0) for _ in own]
    found: dict[Moment, None] = {}
    for chunk, kind, _ in schedule.actions(stage):
        phase = own.index(chunk)
        if kind != FORWARD:
            found[Moment(kind, phase, tuple(held), is_first=not found)] = None
        forward, products = _CHANGES[kind]
        held[phase] = Held(held[phase].forward + forward, held[phase].products + products)
    return tuple(found)


@lru_cache(maxsize=4096)
def _most_in_flight(schedule: Schedule, stage: int) -> int:
    return max(ceil(sum(map(sum, moment.held)) / len(moment.held)) for moment in _moments(schedule, stage))


_CHANGES = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT_GRADIENTS: (-1, 1), WEIGHT_GRADIENTS: (0, -1)}
"""Of what is held, by kind of pass."""


_Passes = list[tuple[int, str]]
"""Chunk and kind of passes in order; each takes the next micro-batch of its chunk."""


def _numbered(passes: Iterable[tuple[int, str]], micro_batches: int) -> Iterator[Action]:
    """The passes with their micro-batches, without those of a micro-batch that is not there."""
    done: Counter[tuple[int, str]] = Counter()
    for chunk, kind in passes:
        counted = (INPUT_GRADIENTS, WEIGHT_GRADIENTS) if kind == BACKWARD else (kind,)
        number = done[chunk, counted[0]]
        done.update((chunk, one) for one in counted)
        if number < micro_batches:
            yield Action(chunk, kind, number)


def _whole(passes: _Passes) -> _Passes:
    """``passes`` with whole backward passes."""
    return [
        (chunk, BACKWARD if kind == INPUT_GRADIENTS else kind) for chunk, kind in passes if kind != WEIGHT_GRADIENTS
    ]


def _one_forward_one_backward(schedule: Schedule, stage: int) -> _Passes:
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


def _zbh1(schedule: Schedule, stage: int) -> _Passes:
    """1F1B, with W of a micro-batch after I of the one that is as many later as there are stages before this one."""
    passes: _Passes = []
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


def _zbv(schedule: Schedule, stage: int) -> _Passes:
    """ZB-V: all passes of each micro-batch, in an order that leaves no bubble if F, I and W take equally long."""
    out, back = schedule.chunks_of(stage)
    f0, i0, w0 = ((out, kind) for kind in "FIW")
    f1, i1, w1 = ((back, kind) for kind in "FIW")
    to_turn = schedule.stages - stage
    count = max(schedule.micro_batches, 2 * schedule.stages - 1)  # fewer leave out passes of this order
    steady = count - schedule.stages
    with_f0 = count - (2 * to_turn - 1) - stage
    return [
        *[f0] * (2 * to_turn - 1), *[f1, f0] * stage, *[f1, i1, w1] * to_turn,
        *[f0, i0, w0, f1, i1, w1] * with_f0, *[i0, w0, f1, i1, w1] * (steady - with_f0),
        *[i0, i1] * stage, *[i0, w0] * to_turn, *[w1] * stage, *[w0] * stage,
    ]  # fmt: skip


def _dualpipev(schedule: Schedule, stage: int) -> _Passes:
    """DualPipeV in its eight steps; a pair of a forward and a backward pass is the one after the other."""
    out, back = schedule.chunks_of(stage)
    f0, b0, i0 = ((out, kind) for kind in "FBI")
    f1, b1, i1, w1 = ((back, kind) for kind in "FBIW")
    later, last = schedule.stages - 1 - stage, stage + 1
    steady = schedule.micro_batches - 2 * schedule.stages + last
    turn = [b1, b0] * last
    divided = [chunk for chunk, _ in turn[last:]]
    waiting = iter([*divided, *[out] * later])
    passes = [
        *[f0] * (2 * later), *[f0, f1] * last, *[i1, w1, f1] * later, *[f0, b1, f1, b0] * steady,
        *[b1, f1, b0] * later, *turn[:last], *((chunk, INPUT_GRADIENTS) for chunk in divided),
    ]  # fmt: skip
    for _ in range(later):
        passes += [(next(waiting), WEIGHT_GRADIENTS), i0]
    return passes + [(chunk, WEIGHT_GRADIENTS) for chunk in waiting]


class Kind(NamedTuple):
    """What distinguishes a schedule."""

    order: Callable[[Schedule, int], _Passes]
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
    "dualpipev": Kind(_dualpipev, 2, True, True),
}
"""The schedules by name."""


def schedule_of(run: RunConfig) -> Schedule:
    """The schedule of ``run``, whose batch is known; DeepSpeed's DualPipeV does not divide the backward pass."""
    parallel = run.parallel
    return Schedule(
        parallel.pipeline_schedule,
        parallel.pipe_stages,
        run.train.gradient_accumulation_steps,
        parallel.model_chunks // parallel.pipe_stages,
        splits_backward=not parallel.uses_dualpipev,
    )


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
