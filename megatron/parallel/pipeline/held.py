"""What a pipeline stage keeps of the micro-batches that are under way. No torch here."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS, Schedule


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


class Peaks(NamedTuple):
    """The moments at which a stage keeps most."""

    moments: tuple[Moment, ...]
    """Those than which none before an equal pass keeps more of every chunk."""
    in_flight: int
    """Micro-batches of which it keeps tensors at a time, at most, in the mean over its chunks."""


def in_flight(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Of each chunk of a stage: forward passes whose activations are kept at a time, when most of them are."""
    return max(kept(schedule, stage), key=sum)


@lru_cache(maxsize=4096)
def kept(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """For each chunk of a stage: forward passes whose B or W is not done; all counts before a B, I or W."""
    moments = _moments(schedule, stage, tuple(range(schedule.chunks)))
    return tuple(dict.fromkeys(tuple(map(sum, moment.held)) for moment in moments))


@lru_cache(maxsize=4096)
def peaks(schedule: Schedule, stage: int, alike: tuple[int, ...]) -> Peaks:
    """The moments at which ``stage`` keeps most.

    Its chunks with the same number in ``alike``, from 0 on, count as one, of which a moment has the sum.
    """
    of_passes: dict[tuple[str, int, bool], list[Moment]] = {}
    for one in _moments(schedule, stage, alike):
        most = of_passes.setdefault((one.kind, one.phase, one.is_first), [])
        if not any(_keeps_as_much(other, one) for other in most):
            most[:] = [*(other for other in most if not _keeps_as_much(one, other)), one]
    moments = tuple(one for most in of_passes.values() for one in most)
    return Peaks(moments, max(ceil(sum(map(sum, moment.held)) / len(alike)) for moment in moments))


def keeping_most(schedule: Schedule, stages: Sequence[int]) -> Sequence[int]:
    """Of ``stages`` with the same layers, which follow one another, those of which one keeps most.

    With 1F1B the first, where more micro-batches are in flight than later on. Where W is put off, or chunks form a V,
    the last one may keep more, and with few micro-batches any.
    """
    if schedule.name in ("1f1b", "interleaved"):
        return stages[:1]
    return sorted({stages[0], stages[-1]}) if schedule.micro_batches >= 2 * schedule.stages else stages


def _moments(schedule: Schedule, stage: int, alike: tuple[int, ...]) -> Iterator[Moment]:
    """What ``stage`` keeps before each B, I and W; all that occur, each once. ``alike`` as in ``peaks``."""
    places, held = dict(zip(schedule.chunks_of(stage), alike, strict=True)), [0, 0] * (max(alike) + 1)
    found: set[tuple[str, int, bool, tuple[int, ...]]] = set()
    for chunk, kind in schedule.passes(stage):
        place = places[chunk]
        one = kind, place, not found, tuple(held)
        if kind != FORWARD and one not in found:
            yield Moment(kind, place, tuple(map(Held, held[::2], held[1::2])), is_first=not found)
            found.add(one)
        forward, products = _CHANGES[kind]
        held[2 * place] += forward
        held[2 * place + 1] += products


def _keeps_as_much(one: Moment, other: Moment) -> bool:
    """Whether ``one`` keeps as much as ``other`` of each chunk, or more."""
    return all(a.forward >= b.forward and a.products >= b.products for a, b in zip(one.held, other.held, strict=True))


_CHANGES = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT_GRADIENTS: (-1, 1), WEIGHT_GRADIENTS: (0, -1)}
"""Of what is held, by kind of pass."""
