"""Curves over the iterations, as SVG."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import NamedTuple

from megatron.tools.reporting.files import Points
from megatron.tools.reporting.svg import FAINT, line, picture, text, ticks

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
