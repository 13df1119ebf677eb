"""Curves over the iterations, as SVG."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from megatron.config.errors import DataError
from megatron.tools.reporting.svg import FAINT, line, picture, text, ticks

Points = Mapping[int, float]
"""Iteration -> value, in order."""


def read_series(path: Path, keys: Sequence[str]) -> dict[str, Points]:
    """The points of a metrics file, one JSON object with an ``iteration`` a line, for each of ``keys``.

    Of an iteration that is there twice, as after a resume, the last line counts. Values that are
    null or not finite are no points. Raises DataError, with the line's number, for a line that is
    no such object, and if there is no loss in all the file.
    """
    series: dict[str, dict[int, float]] = {key: {} for key in keys}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    _add_points(series, f"{path}:{number}", line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a file that --metrics-file wrote") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8; give a file that --metrics-file wrote") from error
    if not (series["lm_loss"] or series["validation_loss"]):
        raise DataError(f"{path}: no lm_loss and no validation_loss to draw; give a file that --metrics-file wrote")
    return {key: dict(sorted(points.items())) for key, points in series.items()}


def _add_points(series: Mapping[str, dict[int, float]], where: str, line: str) -> None:
    """Add what a line holds. Raises DataError if it is not an object with an iteration and numbers."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg}, column {error.colno}); mend or remove the line") from error
    if not isinstance(record, dict) or type(record.get("iteration")) is not int:
        raise DataError(f"{where}: no JSON object with a whole number as its iteration; mend or remove the line")
    for key in series:
        value = record.get(key)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise DataError(f"{where}: {key} is {value!r}, which is no number; mend or remove the line")
        if math.isfinite(value):
            series[key][record["iteration"]] = value


COLOURS = ("#2f6fb2", "#d1603d")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 300, 74, 16, 46, 40
_MOST_POINTS = 800


class Chart(NamedTuple):
    """One picture of one quantity."""

    title: str
    unit: str
    curves: Mapping[str, Points]
    """By name; the second in another colour."""
    from_zero: bool = False


class _Frame(NamedTuple):
    """From iterations and values to places in the picture."""

    first: float
    last: float
    low: float
    high: float

    def x(self, iteration: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (iteration - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - self.low) / (self.high - self.low)


def draw_chart(chart: Chart) -> str:
    """The picture as SVG text; empty where there is no point."""
    curves = {name: points for name, points in chart.curves.items() if points}
    return picture(_WIDTH, _HEIGHT, _parts(chart, curves)) if curves else ""


def _parts(chart: Chart, curves: Mapping[str, Points]) -> Iterator[str]:
    frame = _frame(list(curves.values()), chart.from_zero)
    yield text(_LEFT, 20, chart.title, size=15)
    yield text(_LEFT, 38, chart.unit, size=11, fill=FAINT)
    yield from _axes(frame)
    for number, (name, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        drawn = [(frame.x(iteration), frame.y(value)) for iteration, value in _thinned(points)]
        if len(drawn) <= 40:
            yield "".join(f"<circle cx='{x:.2f}' cy='{y:.2f}' r='2.2' fill='{colour}'/>" for x, y in drawn)
        yield line(drawn, colour)
        if len(curves) > 1:
            yield text(_WIDTH - _RIGHT, 20 + 16 * number, name, anchor="end", fill=colour)


def _frame(curves: Sequence[Points], from_zero: bool) -> _Frame:
    iterations = [iteration for points in curves for iteration in points]
    values = [value for points in curves for value in points.values()]
    first, last, low, high = min(iterations), max(iterations), min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return _Frame(first - (first == last), last + (first == last), low - (0 if from_zero else room), high + room)


def _axes(frame: _Frame) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in ticks(frame.low, frame.high, 5):
        y = frame.y(value)
        yield line([(_LEFT, y), (right, y)], "#dddddd", 1)
        yield text(_LEFT - 6, y + 4, _number(value), size=11, anchor="end", fill=FAINT)
    for iteration in ticks(frame.first, frame.last, 6):
        if iteration == round(iteration):
            yield text(frame.x(iteration), bottom + 16, f"{iteration:,.0f}", size=11, anchor="middle", fill=FAINT)
    yield line([(_LEFT, bottom), (right, bottom)], FAINT, 1)
    yield text(right, bottom + 32, "iteration", size=11, anchor="end", fill=FAINT)


def _number(value: float) -> str:
    return f"{value:,.6g}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def _thinned(points: Points) -> list[tuple[float, float]]:
    """Means of neighbours, where there are more points than one can see."""
    items = list(points.items())
    size = -(-len(items) // _MOST_POINTS)
    groups = [items[begin : begin + size] for begin in range(0, len(items), size)]
    return [(mean(iteration for iteration, _ in group), mean(value for _, value in group)) for group in groups]
