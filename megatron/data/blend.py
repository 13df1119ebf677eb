"""Which data set of a blend each sample comes from: the shares hold exactly, at every point of the stream.

Of the first n samples a data set with the share w has w * n, give or take less than one. That is Tijdeman's solution of
the chairman assignment problem: each sample of a data set has a first and a last place where it may stand, and of those
that may stand here the one whose last place is nearest does. Nothing depends on how many samples are asked for.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class BlendPlan:
    """What the order of a blend is made from.

    Attributes:
        shares: share of each data set; they add up to 1.
        wanted: samples asked for.
    """

    shares: tuple[Fraction, ...]
    wanted: int

    @cached_property
    def period(self) -> int:
        """Samples behind which the order begins again: each data set has had its share to the sample by then."""
        return math.lcm(*(share.denominator for share in self.shares))

    @property
    def length(self) -> int:
        """Samples whose order has to be drawn up."""
        return min(self.period, self.wanted)


class BlendOrder:
    """Where each sample of a blend is found.

    Args:
        sources: the data set of each of the first samples, [length].
        places: how many samples before it are of the same, [length].
    """

    def __init__(self, plan: BlendPlan, sources: np.ndarray, places: np.ndarray) -> None:
        self._plan, self._sources, self._places = plan, sources, places
        self._in_period = [int(share * plan.period) for share in plan.shares]

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The data set of the ``index``-th sample, and which of its own samples that is."""
        periods, place = divmod(index, self._plan.period)
        source = self._sources.item(place)
        return source, periods * self._in_period[source] + self._places.item(place)

    def sources(self, samples: int) -> np.ndarray:
        """The data set of each of the first ``samples``, [samples]."""
        return np.resize(self._sources, samples)

    def counts(self, samples: int) -> list[int]:
        """How many of the first ``samples`` each data set has."""
        periods, rest = divmod(samples, self._plan.period)
        last = np.bincount(self._sources[:rest], minlength=len(self._in_period))
        return [periods * whole + int(part) for whole, part in zip(self._in_period, last, strict=True)]


def build_order(plan: BlendPlan) -> dict[str, np.ndarray]:
    """``sources`` and ``places`` of a ``BlendOrder``."""
    sources = np.fromiter(_draw(plan.shares, plan.length), np.uint16, plan.length)
    places = np.empty(plan.length, np.uint32 if plan.length < 1 << 32 else np.int64)
    for source in range(len(plan.shares)):
        own = sources == source
        places[own] = np.arange(np.count_nonzero(own), dtype=places.dtype)
    return {"sources": sources, "places": places}


def order_shapes(plan: BlendPlan) -> dict[str, tuple[int, ...]]:
    """The shape of each array of ``build_order``, without building them."""
    return {"sources": (plan.length,), "places": (plan.length,)}


def _draw(shares: Sequence[Fraction], length: int) -> Iterator[int]:
    """The data set of each of the first ``length`` samples."""
    if len(shares) == 1:
        yield from itertools.repeat(0, length)
        return
    # A data set with the share w may have its sample t where the n-th of all stands if t + 1 / m <= w * n, and must
    # if w * n > t + 1 - 1 / m: in whole numbers, which are exact, and fast.
    m = 2 * len(shares) - 2
    turns = [(m * share.numerator, share.denominator) for share in shares]
    waiting = [(-(-whole // part), source, 0) for source, (part, whole) in enumerate(turns)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for place in range(1, length + 1):
        while waiting and waiting[0][0] <= place:
            _, source, taken = heapq.heappop(waiting)
            part, whole = turns[source]
            heapq.heappush(ready, (-(-((taken * m + m - 1) * whole) // part), source, taken))
        _, source, taken = heapq.heappop(ready)
        yield source
        part, whole = turns[source]
        heapq.heappush(waiting, (-(-((taken * m + m + 1) * whole) // part), source, taken + 1))
