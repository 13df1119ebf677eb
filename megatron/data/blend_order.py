"""The order of a blend: which data set each sample comes from, and which of its samples that is."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial

import numpy as np

BLEND_WINDOW = 1 << 20
"""Samples of a blend whose order is computed at a time."""


@dataclass(frozen=True)
class BlendWindow:
    """Consecutive samples of a blend.

    Attributes:
        shares: share of each data set; they add up to 1.
        first: samples before the window.
        length: samples in it.
        count: returns how many of those before it are of each data set.
    """

    shares: tuple[Fraction, ...]
    first: int
    length: int
    count: Callable[[], tuple[int, ...]]

    @cached_property
    def _taken(self) -> tuple[int, ...]:
        return self.count()

    def build(self) -> dict[str, np.ndarray]:
        """``sources`` and ``places``, [length]: the data set of each sample, and how many before it are of the same
        one."""
        sources = np.fromiter(_draw(self.shares, self._taken, self.length), np.uint16, self.length)
        return {"sources": sources, "places": self.places(sources)}

    def places(self, sources: np.ndarray) -> np.ndarray:
        """How many samples before each are of the same data set, from the data set of each."""
        places = np.empty(self.length, np.uint32 if self.first + self.length < 1 << 32 else np.int64)
        counts = np.bincount(sources, minlength=len(self.shares))
        first = np.cumsum(counts) - counts - np.array(self._taken)  # one pass for all data sets, of which many are few
        places[np.argsort(sources, kind="stable")] = np.arange(self.length) - np.repeat(first, counts)
        return places


class BlendOrder:
    """The data set of each sample of a blend: the shares hold exactly, at every point of the stream.

    Of the first n samples a data set with the share w has w * n, plus or minus less than one. That is Tijdeman's
    solution of the chairman assignment problem: each sample of a data set has a first and a last position, and of the
    samples that may take a position, the one whose last position comes first does. Nothing depends on how many samples
    are requested. The order is computed for a window of samples at a time, of which few before it are needed.

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

    def counts(self, samples: int) -> tuple[int, ...]:
        """How many of the first ``samples`` are of each data set."""
        periods, position = divmod(samples, self._period)
        rest = taken_before(self._shares, position)
        return tuple(periods * whole + part for whole, part in zip(self._in_period, rest, strict=True))

    def _load_window(self, number: int) -> Mapping[str, np.ndarray]:
        first = number * BLEND_WINDOW
        length = min(BLEND_WINDOW, self._length - first)
        return self._load(BlendWindow(self._shares, first, length, partial(self._taken_before, number)))

    def _taken_before(self, number: int) -> tuple[int, ...]:
        """Samples of each data set before a window."""
        latest, before = self._before if self._before[0] <= number else (0, (0,) * len(self._shares))
        if _longest_wait(self._shares) < (number - latest) * BLEND_WINDOW:
            before, latest = taken_before(self._shares, number * BLEND_WINDOW), number
        self._before = latest, before  # of one window: those of all would be as large as the blend is long
        while latest < number:
            before = _counts(self._window(latest)["sources"], before)
            latest += 1
            self._before = latest, before
        return before


def taken_before(shares: Sequence[Fraction], position: int) -> tuple[int, ...]:
    """Samples of each data set among the first ``position`` ones of their order.

    It begins a little earlier, where some samples must have been taken, and some of others, as many as are missing.
    Which of those matters only until each of them must have been taken: if some order holds all last positions, so does
    one that begins with those whose last position comes first, and later it has taken the same samples.
    """
    if len(shares) == 1:
        return (position,)
    begin, m = max(position - _longest_wait(shares), 0), 2 * len(shares) - 2
    taken, either = [], []
    for source, share in enumerate(shares):
        # Where several have the same last position, one of them is taken in the next one.
        must, may = (place * m * share.numerator // share.denominator for place in (begin - 1, begin))
        taken.append(max((must + 1) // m, 0))
        either += [(_last(count, share, m), source) for count in range(taken[-1], (may + m - 1) // m)]
    for _, source in sorted(either)[: begin - sum(taken)]:
        taken[source] += 1
    drawn = np.fromiter(_draw(shares, taken, position - begin), np.uint16, position - begin)
    return _counts(drawn, taken)


def _longest_wait(shares: Sequence[Fraction]) -> int:
    """From the first position of any sample to its last one, at most."""
    return math.ceil(1 / min(shares)) + 3


def _last(count: int, share: Fraction, m: int) -> int:
    """The last position of the sample after ``count`` ones of a data set; see ``_draw``."""
    return -(-((count * m + m - 1) * share.denominator) // (m * share.numerator))


def _counts(sources: np.ndarray, before: Sequence[int]) -> tuple[int, ...]:
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
