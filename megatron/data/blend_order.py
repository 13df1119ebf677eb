"""The order of samples in a blend: the data set of each sample, and its index in that data set."""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache, partial

import numpy as np

BLEND_WINDOW = 1 << 20
"""Samples whose order is computed at a time."""


@dataclass(frozen=True)
class BlendWindow:
    """Consecutive samples of a blend.

    Attributes:
        shares: share of each data set; they add up to 1.
        first: number of samples before the window.
        length: number of samples in the window.
        count: returns, for each data set, its number of samples before the window.
    """

    shares: tuple[Fraction, ...]
    first: int
    length: int
    count: Callable[[], tuple[int, ...]]

    @cached_property
    def _taken(self) -> tuple[int, ...]:
        return self.count()

    def build(self) -> dict[str, np.ndarray]:
        """``sources`` and ``places``, [length]: the data set of each sample, and the number of earlier samples of the
        blend from that data set."""
        sources = np.fromiter(_draw(self.shares, self._taken, self.length), np.uint16, self.length)
        return {"sources": sources, "places": self.places(sources)}

    def places(self, sources: np.ndarray) -> np.ndarray:
        """For each sample, the number of earlier samples from its data set; ``sources`` are the data sets, [length]."""
        places = np.empty(self.length, np.uint32 if self.first + self.length < 1 << 32 else np.int64)
        counts = np.bincount(sources, minlength=len(self.shares))
        first = np.cumsum(counts) - counts - np.array(self._taken)  # for all data sets, of which there may be thousands
        places[np.argsort(sources, kind="stable")] = np.arange(self.length) - np.repeat(first, counts)
        return places


class BlendOrder:
    """The data set of each sample of a blend, with exact shares at every point of the stream.

    A data set with the share w has w * n of the first n samples, with an error below one: Tijdeman's solution of the
    chairman assignment problem. Each sample of a data set has a first and a last position (a deadline); of the samples
    that may take a position, the one with the earliest deadline takes it. The order does not depend on the number of
    requested samples. It is computed for a window at a time, from only the last few samples before the window;
    ``load`` returns the arrays of ``BlendWindow.build``, such as from a cache.
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
        """The number of samples of each data set among the first ``samples``."""
        periods, position = divmod(samples, self._period)
        rest = taken_before(self._shares, position)
        return tuple(periods * complete + part for complete, part in zip(self._in_period, rest, strict=True))

    def _load_window(self, number: int) -> Mapping[str, np.ndarray]:
        first = number * BLEND_WINDOW
        length = min(BLEND_WINDOW, self._length - first)
        return self._load(BlendWindow(self._shares, first, length, partial(self._taken_before, number)))

    def _taken_before(self, number: int) -> tuple[int, ...]:
        """The number of samples of each data set before window ``number``."""
        latest, before = self._before if self._before[0] <= number else (0, (0,) * len(self._shares))
        if _longest_wait(self._shares) < (number - latest) * BLEND_WINDOW:
            before, latest = taken_before(self._shares, number * BLEND_WINDOW), number
        self._before = latest, before  # of one window only: counts of all windows would grow with the blend
        while latest < number:
            before = _counts(self._window(latest)["sources"], before)
            latest += 1
            self._before = latest, before
        return before


def taken_before(shares: Sequence[Fraction], position: int) -> tuple[int, ...]:
    """The number of samples of each data set among the first ``position`` samples of the blend.

    The count starts a little before ``position``, with the samples whose deadline has passed there. The places that
    remain go to the samples with the earliest deadlines among those that may have been taken. The real order may have
    taken others of them, but once all these deadlines have passed, both orders have taken the same samples.
    """
    if len(shares) == 1:
        return (position,)
    begin, m = max(position - _longest_wait(shares), 0), 2 * len(shares) - 2
    taken, either = [], []
    for source, share in enumerate(shares):
        # Of several samples with the same deadline, some are taken at the next position.
        must, may = (place * m * share.numerator // share.denominator for place in (begin - 1, begin))
        taken.append(max((must + 1) // m, 0))
        either += [(_last(count, share, m), source) for count in range(taken[-1], (may + m - 1) // m)]
    for _, source in sorted(either)[: begin - sum(taken)]:
        taken[source] += 1
    drawn = np.fromiter(_draw(shares, taken, position - begin), np.uint16, position - begin)
    return _counts(drawn, taken)


def _longest_wait(shares: Sequence[Fraction]) -> int:
    """Upper bound of the number of positions between the first and the last position of a sample."""
    return math.ceil(1 / min(shares)) + 3


def _last(count: int, share: Fraction, m: int) -> int:
    """The last position (deadline) of sample ``count`` of a data set; see ``_draw``."""
    return -(-((count * m + m - 1) * share.denominator) // (m * share.numerator))


def _counts(sources: np.ndarray, before: Sequence[int]) -> tuple[int, ...]:
    """The number of samples of each data set: in ``sources``, plus the counts ``before`` them."""
    counts = np.bincount(sources, minlength=len(before)).tolist()
    return tuple(earlier + count for earlier, count in zip(before, counts, strict=True))


def _draw(shares: Sequence[Fraction], taken: Sequence[int], length: int) -> Iterator[int]:
    """Yield the data set of each of ``length`` samples; ``taken`` is the number of earlier samples of each data set."""
    if len(shares) == 1:
        yield from itertools.repeat(0, length)
        return
    # Sample t of a data set with the share w may be at position n of the blend if t + 1 / m <= w * n, and must be at n
    # or before if w * n > t + 1 - 1 / m. Computed in integers, which are exact and fast.
    m = 2 * len(shares) - 2
    ratios = [(m * share.numerator, share.denominator) for share in shares]
    waiting = [
        (-(-((count * m + 1) * divisor) // part), source, count)
        for source, (count, (part, divisor)) in enumerate(zip(taken, ratios, strict=True))
    ]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    first = sum(taken) + 1
    for position in range(first, first + length):
        while waiting and waiting[0][0] <= position:
            _, source, count = heapq.heappop(waiting)
            part, divisor = ratios[source]
            heapq.heappush(ready, (-(-((count * m + m - 1) * divisor) // part), source, count))
        _, source, count = heapq.heappop(ready)
        yield source
        part, divisor = ratios[source]
        heapq.heappush(waiting, (-(-((count * m + m + 1) * divisor) // part), source, count + 1))
