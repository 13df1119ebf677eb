"""Time several implementations of the same work in alternation, and compare them as ratios."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


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
    """An amount that is no speed, compared with another: measured and planned bytes, two delays in seconds."""

    what: str
    peer: str
    """The other amount."""
    ours: list[float]
    theirs: list[float]
    """As many, each beside one of ``ours``."""
    unit: str
    """B, s, or another word, which then stands for a plain number."""

    @property
    def ratios(self) -> list[float]:
        """The suite's as a multiple of the other, one by one."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


Result = Comparison | Quantity


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
    wall, cpu = time.perf_counter(), _cpu_seconds()
    found = way()
    settle()
    return found if isinstance(found, Seconds) else Seconds(time.perf_counter() - wall, _cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system
