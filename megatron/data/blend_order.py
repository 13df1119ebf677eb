"""The order of a blend: which data set each sample comes from, and which of its samples that is."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

BLEND_WINDOW = 1 << 20
"""Samples of a blend whose order is computed at a time."""


class BlendWindow(NamedTuple):
    """Consecutive samples of a blend."""

    shares: tuple[Fraction, ...]
    """Share of each data set; they add up to 1."""
    taken: tuple[int, ...]
    """Samples of each data set before the window."""
    length: int
    """Samples in it."""

    def build(self) -> dict[str, np.ndarray]:
        """``sources`` and ``places``, [length]: the data set of each sample, and how many before it are of the same
        one."""
        sources = np.fromiter(_draw(self.shares, self.taken, self.length), np.uint16, self.length)
        return {"sources": sources, "places": self.places(sources)}

    def places(self, sources: np.ndarray) -> np.ndarray:
        """How many samples before each are of the same data set, from the data set of each."""
        places = np.empty(self.length, np.uint32 if self.length + sum(self.taken) < 1 << 32 else np.int64)
        counts = np.bincount(sources, minlength=len(self.taken))
        first = np.cumsum(counts) - counts - np.array(self.taken)  # one pass for all data sets, of which many are few
        places[np.argsort(sources, kind="stable")] = np.arange(self.length) - np.repeat(first, counts)
        return places


class BlendOrder:
    """The data set of each sample of a blend: the shares hold exactly, at every point of the stream.

    Of the first n samples a data set with the share w has w * n, plus or minus less than one. That is Tijdeman's
    solution of the chairman assignment problem: each sample of a data set has a first and a last position, and of the
    samples that may take a position, the one whose last position comes first does. Nothing depends on how many samples
    are requested. The order is computed for a window of samples at a time; what precedes a window is needed for it.

    Args:
        shares: share of each data set; they add up to 1.
        samples: samples that are needed.
        load: returns what ``build`` of a window does.
    """

    def __init__(
        self,
        shares: tuple[Fraction, ...],
        samples: int,
        load: Callable[[BlendWindow], Mapping[str, np.ndarray]] = BlendWindow.build,
    ) -> None:
        self._shares, self._load = shares, load
        # The order repeats when each data set has had exactly its share.
        self._period = math.lcm(*(share.denominator for share in shares))
        self._in_period = [int(share * self._period) for share in shares]
        self._length = min(self._period, samples)
        self._before = 0, (0,) * len(shares)
        self._window = lru_cache(maxsize=2)(self._load_window)
        self._window(0)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """The data set of the ``index``-th sample, and its index among the samples of that data set."""
        periods, position = divmod(index, self._period)
        number, at = divmod(position, BLEND_WINDOW)
        window = self._window(number)
        source = window["sources"].item(at)
        return source, periods * self._in_period[source] + window["places"].item(at)

    def _load_window(self, number: int) -> Mapping[str, np.ndarray]:
        latest, before = self._before if self._before[0] <= number else (0, (0,) * len(self._shares))
        while latest < number:
            before = _counts(self._window(latest)["sources"], before)
            latest += 1
        self._before = latest, before  # of one window: those of all would be as large as the blend is long
        length = min(BLEND_WINDOW, self._length - number * BLEND_WINDOW)
        return self._load(BlendWindow(self._shares, before, length))


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
