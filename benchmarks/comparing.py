"""Time several implementations of the same work in alternation, and compare them as ratios."""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Seconds(NamedTuple):
    """Of one call."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Times:
    """Seconds of one way, round by round."""

    wall: list[float]
    cpu: list[float]
    """Of all threads of the process, and of the processes that it started and saw end. On a busy machine these say more
    than the clock on the wall."""


@dataclass(frozen=True)
class Comparison:
    """The suite's way against a peer's, on the same work, measured in the same rounds."""

    what: str
    """The work, and how it was set up."""
    peer: str
    ours: Times
    theirs: Times
    work: float
    """How much of ``unit`` one round does."""
    unit: str
    goal: float | None = None
    """The least ratio that is good enough; None where the comparison is there to be read."""
    is_limit: bool = False
    """Whether the other is the least that the work can cost here: only what cannot be left out of it, by itself. Missed
    goals of the same workload, the words of ``what`` before its colon, are held to it."""

    @property
    def ratios(self) -> list[float]:
        """The suite's speed as a multiple of the peer's, by wall clock, round by round."""
        return [theirs / ours for ours, theirs in zip(self.ours.wall, self.theirs.wall, strict=True)]

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU time: median of the rounds."""
        rounds = zip(self.ours.cpu, self.theirs.cpu, strict=True)
        return statistics.median(theirs / ours if ours else 1.0 for ours, theirs in rounds)


@dataclass(frozen=True)
class Quantity:
    """What is no speed, beside what it is held to: bytes beside those planned, seconds beside a limit."""

    what: str
    peer: str
    """What it is held to."""
    ours: list[float]
    theirs: list[float]
    """As many, each beside one of ``ours``."""
    unit: str
    """B, s, or another word, which then stands for a plain number."""
    least: float | None = None
    """The least ratio that is good enough."""
    most: float | None = None
    """The largest one."""
    is_limit: bool = False
    """As of a comparison."""

    @property
    def ratios(self) -> list[float]:
        """The suite's as a multiple of the other, one by one."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


@dataclass(frozen=True)
class Growth(Quantity):
    """Exponents, measured and by theory, and the points they were fitted to."""

    points: list[tuple[float, float, float]] = field(default_factory=list)
    """Size, what was measured there, what theory says."""
    axis: str = ""
    amount: str = ""
    """What was measured, with its unit."""


Result = Comparison | Quantity
Values = Sequence[float]
FITTED, TOLERANCE = 3, 0.1
"""Points that a power law is fitted to, from the largest; how far its exponent may be from theory's."""


def alternate(
    ways: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: int = 1,
    settle: Callable[[], Any] = lambda: None,
) -> dict[str, Times]:
    """Time every way once a round, each round from another one on, so that what else the machine does meets all.

    ``warm_up`` rounds go first and do not count.
    """
    names = list(ways)
    times = {name: Times([], []) for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = timed(ways[name], settle)
            if number >= 0:
                times[name].wall.append(seconds.wall)
                times[name].cpu.append(seconds.cpu)
    return times


def timed(way: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> Seconds:
    """What one call takes, unless it says so itself. ``settle`` runs whenever a clock is read: it waits for a device,
    or for the other ranks."""
    settle()
    wall, cpu = time.perf_counter(), _processor_seconds()
    found = way()
    settle()
    return found if isinstance(found, Seconds) else Seconds(time.perf_counter() - wall, _processor_seconds() - cpu)


def _processor_seconds() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def fitted(sizes: Values, by_round: Sequence[Values], theory: Values, axis: str, amount: str) -> Growth:
    """Exponents of each round; the points are medians, and theory is drawn through their geometric mean."""
    measured = np.median(np.array(by_round, dtype=float), axis=0)
    scale = np.exp(np.mean((np.log(measured) - np.log(theory))[-FITTED:]))
    ours, theirs = [exponent(sizes, values) for values in by_round], exponent(sizes, theory)
    points = [(float(x), float(y), float(scale * t)) for x, y, t in zip(sizes, measured, theory, strict=True)]
    what = f"{amount.partition(',')[0]}, {sizes[0]:,} to {sizes[-1]:,} {axis}"
    bounds = {"least": 1 - TOLERANCE, "most": 1 + TOLERANCE}
    return Growth(
        what, "theory", ours, [theirs] * len(ours), "exponent", **bounds, points=points, axis=axis, amount=amount
    )


def exponent(sizes: Values, values: Values) -> float:
    """The slope of the straight line through the logarithms, at the largest sizes."""
    x, y = (np.log(np.array(amounts[-FITTED:], dtype=float)) for amounts in (sizes, values))
    return float(np.polyfit(x, y, 1)[0])
