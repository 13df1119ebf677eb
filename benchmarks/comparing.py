"""Measuring ways of doing the same work, in turn, and what comes out as ratios."""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


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

    @property
    def ratios(self) -> list[float]:
        """The suite's speed as a multiple of the peer's, by wall clock, round by round."""
        return [theirs / ours for ours, theirs in zip(self.ours.wall, self.theirs.wall, strict=True)]

    @property
    def cpu_ratio(self) -> float:
        """The same by processor time: median of the rounds."""
        rounds = zip(self.ours.cpu, self.theirs.cpu, strict=True)
        return statistics.median(theirs / ours if ours else 1.0 for ours, theirs in rounds)


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, Times]:
    """Time every way once a round, each round from another one on, so that what else the machine does meets all.

    ``warm_up`` rounds go first and do not count.
    """
    names = list(ways)
    times = {name: Times([], []) for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu = time.perf_counter(), _processor_seconds()
            ways[name]()
            wall, cpu = time.perf_counter() - wall, _processor_seconds() - cpu
            if number >= 0:
                times[name].wall.append(wall)
                times[name].cpu.append(cpu)
    return times


def markdown(comparisons: Sequence[Comparison]) -> str:
    """A table, one line for each comparison."""
    lines = [
        "| work | against | suite | peer | ratio (least to largest) | by CPU time | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_line, comparisons)])


def as_json(comparisons: Sequence[Comparison]) -> str:
    """Every second of every round."""
    return json.dumps([asdict(c) | {"ratios": c.ratios} for c in comparisons], indent=2)


def _processor_seconds() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def _line(comparison: Comparison) -> str:
    c, ratios = comparison, comparison.ratios
    speeds = [_speed(c.work / statistics.median(times.wall), c.unit) for times in (c.ours, c.theirs)]
    spread = f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"
    goal = "" if c.goal is None else f"{c.goal:.2f}"
    return f"| {c.what} | {c.peer} | {speeds[0]} | {speeds[1]} | {spread} | {c.cpu_ratio:.2f} | {goal} |"


def _speed(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}/s" if value >= 100 else f"{value:.3g} {unit}/s"
