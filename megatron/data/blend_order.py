"""The order of a blend: which data set each sample comes from, and which of its samples that is."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np

BLEND_WINDOW = 1 << 20
"""Samples of a blend whose order is computed at a time."""


@dataclass(frozen=True)
class BlendPlan:
    """Shares and length of a blend, from which its order is computed, or a window of it."""

    shares: tuple[Fraction, ...]
    """Share of each data set; they add up to 1."""
    requested: int
    """Samples needed, counted from the first of the blend."""
    taken: tuple[int, ...] = ()
    """Samples of each data set before the window; empty if it is the first one."""

    @cached_property
    def period(self) -> int:
        """Samples after which the order repeats: each data set has had exactly its share by then."""
        return math.lcm(*(share.denominator for share in self.shares))

    @property
    def length(self) -> int:
        """Samples whose order has to be computed."""
        return min(self.period, self.requested) - sum(self.taken)

    def window(self, taken: tuple[int, ...]) -> "BlendPlan":
        """The window that begins after that many samples of each data set."""
        return replace(self, requested=min(self.period, self.requested, sum(taken) + BLEND_WINDOW), taken=taken)

    def build(self) -> dict[str, np.ndarray]:
        """``sources`` and ``places`` of the window, [length]: the data set of each sample, and how many before it are
        of the same one."""
        taken = self.taken or (0,) * len(self.shares)
        sources = np.fromiter(_draw(self.shares, taken, self.length), np.uint16, self.length)
        places = np.empty(self.length, np.uint32 if self.length + sum(taken) < 1 << 32 else np.int64)
        for source, before in enumerate(taken):
            is_its_own = sources == source
            places[is_its_own] = np.arange(before, before + np.count_nonzero(is_its_own), dtype=places.dtype)
        return {"sources": sources, "places": places}


class BlendOrder:
    """The data set of each sample of a blend: the shares hold exactly, at every point of the stream.

    Of the first n samples a data set with the share w has w * n, plus or minus less than one. That is Tijdeman's
    solution of the chairman assignment problem: each sample of a data set has a first and a last position, and of the
    samples that may take a position, the one whose last position comes first does. Nothing depends on how many samples
    are requested. The order is computed for a window of samples at a time; what precedes a window is needed for it.

    Args:
        sources, places: arrays of the first window, see ``BlendPlan.build``.
        load: returns the arrays of a later window.
    """

    def __init__(
        self,
        plan: BlendPlan,
        sources: np.ndarray,
        places: np.ndarray,
        load: Callable[[BlendPlan], Mapping[str, np.ndarray]] = BlendPlan.build,
    ) -> None:
        self._plan, self._load = plan, load
        self._in_period = [int(share * plan.period) for share in plan.shares]
        self._before: list[tuple[int, ...]] = [(0,) * len(plan.shares)]
        self._first = {"sources": sources, "places": places}
        self._window = lru_cache(maxsize=2)(self._open_window)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The data set of the ``index``-th sample, and its index among the samples of that data set."""
        periods, position = divmod(index, self._plan.period)
        number, at = divmod(position, BLEND_WINDOW)
        window = self._window(number)
        source = window["sources"].item(at)
        return source, periods * self._in_period[source] + window["places"].item(at)

    def sources(self, samples: int) -> np.ndarray:
        """The data set of each of the first ``samples``, [samples]."""
        needed = min(samples, self._plan.period)
        windows = [self._window(number)["sources"] for number in range(-(-needed // BLEND_WINDOW))]
        return np.resize(np.concatenate([np.empty(0, np.uint16), *windows]), samples)

    def _open_window(self, number: int) -> Mapping[str, np.ndarray]:
        taken = self._taken_before(number)
        return self._load(self._plan.window(taken)) if number else self._first

    def _taken_before(self, number: int) -> tuple[int, ...]:
        """Samples of each data set before the ``number``-th window."""
        while len(self._before) <= number:
            latest = len(self._before) - 1
            self._before.append(_counts(self._window(latest)["sources"], self._before[latest]))
        return self._before[number]


def _counts(sources: np.ndarray, before: tuple[int, ...]) -> tuple[int, ...]:
    """Samples of each data set among ``sources`` and those ``before`` them."""
    counts = np.bincount(sources, minlength=len(before)).tolist()
    return tuple(earlier + count for earlier, count in zip(before, counts, strict=True))


def _draw(shares: Sequence[Fraction], taken: Sequence[int], length: int) -> Iterator[int]:
    """The data set of each of ``length`` samples, after that many of each data set have been ``taken``."""
    if len(shares) == 1:
        yield from itertools.repeat(0, length)
        return
    # Sample t of a data set with the share w may be the n-th of all if t + 1 / m <= w * n, and must be by then
    # if w * n > t + 1 - 1 / m: computed in whole numbers, which are exact, and fast.
    m = 2 * len(shares) - 2
    ratios = [(m * share.numerator, share.denominator) for share in shares]
    waiting = [
        (-(-((count * m + 1) * whole) // part), source, count)
        for source, (count, (part, whole)) in enumerate(zip(taken, ratios, strict=True))
    ]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    first = sum(taken) + 1
    for position in range(first, first + length):
        while waiting and waiting[0][0] <= position:
            _, source, count = heapq.heappop(waiting)
            part, whole = ratios[source]
            heapq.heappush(ready, (-(-((count * m + m - 1) * whole) // part), source, count))
        _, source, count = heapq.heappop(ready)
        yield source
        part, whole = ratios[source]
        heapq.heappush(waiting, (-(-((count * m + m + 1) * whole) // part), source, count + 1))
