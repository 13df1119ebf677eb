"""The values that a user provides, with their sources, and the intervals that they must be in."""

from typing import Any, NamedTuple


class Source(str):
    """A flag with its value as typed, such as ``--lr 0.1``, after the place that it is from, such as file and line."""

    typed: str

    def __new__(cls, typed: str, place: str = "") -> "Source":
        source = super().__new__(cls, f"{place}: {typed}" if place else typed)
        source.typed = typed
        return source


class Provided(NamedTuple):
    """A value that the user provided for a field, as opposed to its default, and the source that messages quote."""

    value: Any
    source: str
    """A ``Source`` or a flag with its value, or the JSON key with its value and file."""

    @property
    def words(self) -> list[str]:
        """The command-line arguments that provide the value, if its source is a flag."""
        flag, *rest = (self.source.typed if isinstance(self.source, Source) else self.source).split(" ", 1)
        return [flag, *map(str, self.value)] if isinstance(self.value, tuple) else [flag, *rest]


def inside(value: float, interval: str) -> bool:
    """Whether ``value`` lies in an interval such as ``"[0, 1)"``."""
    low, high = ends(interval)
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


_MANY = 1000
"""Limits from here on are those of computers, not of the meaning of a value."""


def is_above(value: float, interval: str) -> bool:
    """Whether ``value`` is beyond what a computer has."""
    _, high = ends(interval)
    return value > high >= _MANY


def interval_as_text(interval: str, value: float) -> str:
    """The interval that ``value`` is outside of, such as ``"[0, 1)"``, as text for messages."""
    low, high = ends(interval)
    if is_above(value, interval):
        return f"{high:,.0f} at most"
    if high >= _MANY:
        return f"{low:g} or more" if interval[0] == "[" else f"more than {low:g}"
    return f"from {low:g} to {high:.0f}" + ("" if interval[-1] == "]" else f", {high:g} excluded")


def ends(interval: str) -> tuple[float, float]:
    """The two numbers of an interval; ``inf`` if it is unbounded."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)
