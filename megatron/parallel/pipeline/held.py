"""What a pipeline stage keeps of the micro-batches that are under way. No torch here."""

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from operator import add, ge
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import BACKWARD, FORWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS, Schedule


class Peak(NamedTuple):
    """What a stage keeps at most before passes of a kind that is not a forward pass."""

    kind: str
    """Of the passes."""
    phase: int
    """Of their model chunk, among those of the stage."""
    is_first: bool
    """Whether no backward pass of the stage has run yet, so that there are no gradients of its weights."""
    held: tuple[tuple[int, ...], ...]
    """One or several states, of which none has less of each than another: for each chunk of the stage the micro-batches
    of which it keeps activations, and those of which it keeps what W is computed from, after I."""


class Peaks(NamedTuple):
    """What a stage keeps at most."""

    before: tuple[Peak, ...]
    """For each kind of passes."""
    in_flight: int
    """Micro-batches of which it keeps tensors at a time, in the mean over its chunks."""


def in_flight(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Of each chunk of a stage: forward passes whose activations are kept at a time, when most of them are."""
    return max(kept(schedule, stage), key=sum)


@lru_cache(maxsize=4096)
def kept(schedule: Schedule, stage: int) -> tuple[tuple[int, ...], ...]:
    """For each chunk of a stage: forward passes whose B or W is not done; all counts before a B, I or W."""
    moments = _moments(schedule, stage, tuple(range(schedule.chunks)))
    return tuple(dict.fromkeys(tuple(map(add, held[::2], held[1::2])) for _, held in moments))


@lru_cache(maxsize=4096)
def peaks(schedule: Schedule, stage: int, alike: tuple[int, ...]) -> Peaks:
    """What ``stage`` keeps at most.

    Its chunks with the same number in ``alike``, from 0 on, count as one, of which a state has the sum.
    """
    found: dict[tuple[str, int, bool], list[tuple[int, ...]]] = {}
    for passes, held in _moments(schedule, stage, alike):
        most = found.setdefault(passes, [])
        if not any(all(map(ge, other, held)) for other in most):
            most[:] = [*(other for other in most if not all(map(ge, held, other))), held]
    together = max(sum(held) for most in found.values() for held in most)
    return Peaks(tuple(Peak(*passes, tuple(most)) for passes, most in found.items()), ceil(together / len(alike)))


def _moments(
    schedule: Schedule, stage: int, alike: tuple[int, ...]
) -> Iterator[tuple[tuple[str, int, bool], tuple[int, ...]]]:
    """What ``stage`` keeps before each B, I and W, as in ``Peak``; all that occur, each once. ``alike`` as there."""
    places, held = dict(zip(schedule.chunks_of(stage), alike, strict=True)), [0, 0] * (max(alike) + 1)
    found: set[tuple[tuple[str, int, bool], tuple[int, ...]]] = set()
    for chunk, kind in schedule.passes(stage):
        place = places[chunk]
        one = (kind, place, not found), tuple(held)
        if kind != FORWARD and one not in found:
            yield one
            found.add(one)
        forward, products = _CHANGES[kind]
        held[2 * place] += forward
        held[2 * place + 1] += products


_CHANGES = {FORWARD: (1, 0), BACKWARD: (-1, 0), INPUT_GRADIENTS: (-1, 1), WEIGHT_GRADIENTS: (0, -1)}
"""Of what is held, by kind of pass."""


def keeping_most(schedule: Schedule, first: int, last: int) -> list[int]:
    """Of the stages from ``first`` to ``last``, which hold the same layers, those of which one keeps most.

    With 1F1B the first, where more micro-batches are in flight than later on. Where W is put off, or chunks form a V,
    perhaps the last one; with ZB-V and few micro-batches one between them, before which all of them have begun.
    """
    p, m = schedule.stages, schedule.micro_batches
    if schedule.name in ("1f1b", "interleaved"):
        return [first]
    between = () if schedule.name != "zbv" else (2 * p - 1 - m, 2 * p - m) if m > p else (m - 2,)
    return sorted({first, last, *(stage for stage in between if first < stage < last)})
