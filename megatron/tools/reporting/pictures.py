"""Pictures as SVG text: the timeline of the ranks in one iteration, and the load of each expert over time."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from statistics import mean
from typing import NamedTuple

from megatron.common.errors import counted
from megatron.parallel.pipeline.simulation import simulate
from megatron.tools.reporting.files import Points
from megatron.tools.reporting.timeline import SHARES, Event, Measures, Timeline, pass_seconds

COLORS = {
    "forward": "#5b9bd5", "backward": "#6ab187", "weights": "#d6a520", "send": "#7a4b2a", "receive": "#dcdcdc",
    "exchange": "#dcdcdc", "reduce": "#c8553d", "step": "#8f6bb3", "load": "#8a8a8a", "collective": "#2c3e50",
    "all-to-all": "#d6409f",
}  # fmt: skip
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 1200, 130, 20, 30, 22
_MAX_ROWS = 32
_FAINT = "#767676"


class _Bar(NamedTuple):
    """A bar of a row. Times are seconds from the left edge."""

    begin: float
    end: float
    kind: str
    number: int | None
    tooltip: str


def draw(timeline: Timeline, measures: Measures) -> str:
    """The picture of the traced iteration that took the median time, as SVG text."""
    by_duration = sorted(timeline.iterations, key=timeline.seconds)
    iteration = by_duration[(len(by_duration) - 1) // 2]
    ranks = _shown(timeline)
    rows = [(_label(timeline, rank), _measured(timeline, rank, ranks, iteration)) for rank in ranks]
    theory = _theory(timeline, ranks, iteration) if measures.theory is not None and timeline.shape.stages > 1 else []
    span = max(bar.end for _, bars in (*rows, *theory) for bar in bars)
    parts = [text(20, 32, f"Ranks in iteration {iteration}", size=20), *_figures(timeline, measures)]
    parts += _legend(116, timeline)
    top = 150.0
    parts += _rows(rows, top, span)
    top += _ROW * len(rows) + 8
    parts += _axis(top, span)
    top += 46
    if theory:
        parts.append(text(20, top, "The schedule in theory, if every pass takes the mean time", size=15))
        parts += _rows(theory, top + 14, span)
        top += 14 + _ROW * len(theory) + 34
    parts += _table(timeline, measures, ranks, top)
    height = top + 24 * (len(ranks) + 1) + 20
    return (
        # Without a height and in percent: a narrower window scales the picture instead of cutting it.
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {height:g}' width='100%' "
        f"style='max-width: {_WIDTH}px' font-family='Helvetica, Arial, sans-serif'>\n"
        "<rect width='100%' height='100%' fill='white'/>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _shown(timeline: Timeline) -> list[int]:
    """All ranks, or one pipeline if they are too many."""
    ranks = [rank for pipeline in timeline.pipelines for rank in pipeline]
    return (ranks if len(ranks) <= _MAX_ROWS else timeline.pipelines[0])[:_MAX_ROWS]


def _label(timeline: Timeline, rank: int) -> str:
    return f"rank {rank}, stage {timeline.coordinates[rank]['pipe']}"


def _measured(timeline: Timeline, rank: int, ranks: Sequence[int], iteration: int) -> list[_Bar]:
    zero = min(event.begin for other in ranks for event in timeline.instructions(other, iteration))
    events = [event for event in timeline.events[rank] if event.iteration == iteration and event.layer is None]
    return [_bar(event, zero) for event in sorted(events, key=lambda event: event.begin)]  # enclosed events come last


def _bar(event: Event, zero: float) -> _Bar:
    which = f" of micro-batch {event.micro_batch}{_chunk(event.phase)}" if event.micro_batch else ""
    tooltip = f"{event.name}{which}: {event.seconds * 1000:.2f} ms"
    if event.collective:
        kind = "all-to-all" if event.is_all_to_all else "collective"
        return _Bar(event.begin - zero, event.end - zero, kind, None, f"{event.collective} in {tooltip}")
    number = event.micro_batch if event.kind in _KINDS.values() else None
    return _Bar(event.begin - zero, event.end - zero, event.kind, number, tooltip)


def _chunk(phase: int | None) -> str:
    return "" if phase is None else f", model chunk {phase + 1} of the stage"


def _theory(timeline: Timeline, ranks: Sequence[int], iteration: int) -> list[tuple[str, list[_Bar]]]:
    """The passes of each stage, each as early as its dependencies allow."""
    schedule = timeline.schedule
    assert schedule is not None
    bars: list[list[_Bar]] = [[] for _ in range(schedule.stages)]
    for stage, action, begin, end in simulate(schedule, pass_seconds(timeline, ranks, iteration)):
        kind, number = _KINDS[action.kind], action.micro_batch + 1
        phase = action.chunk // schedule.stages if schedule.chunks > 1 else None
        bars[stage].append(_Bar(begin, end, kind, number, f"{kind} of micro-batch {number}{_chunk(phase)}"))
    return [(f"stage {stage}", of_stage) for stage, of_stage in enumerate(bars[:_MAX_ROWS])]


_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


def _rows(rows: Sequence[tuple[str, list[_Bar]]], top: float, span: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / span
    for number, (label, bars) in enumerate(rows):
        y = top + number * _ROW
        yield text(20, y + 16, label)
        yield box(_LEFT, y, _WIDTH - _LEFT - _RIGHT, _BAR, "#f4f4f4")
        for bar in bars:
            x, width = _LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
            height = _BAR / 4 if bar.kind in ("collective", "all-to-all") else _BAR
            # A thin gap between adjacent bars.
            yield box(x, y + _BAR - height, max(width - 0.6, 0.4), height, COLORS.get(bar.kind, "#cccccc"), bar.tooltip)
            if bar.number is not None and width > 7 * len(str(bar.number)) + 3:
                yield text(x + width / 2, y + 15, str(bar.number), size=11, anchor="middle", fill="white")


def _figures(timeline: Timeline, measures: Measures) -> Iterator[str]:
    shape = timeline.shape
    yield text(
        20, 58,
        f"{counted(shape.stages, 'stage')}, {counted(shape.micro_batches, 'micro-batch')}, {shape.schedule}; medians "
        f"of {counted(len(timeline.iterations), 'iteration')}: {measures.seconds * 1000:.1f} ms each",
        size=14,
    )  # fmt: skip
    theory = ""
    if measures.theory is not None:
        formula = "(p-1)/(m+p-1) = " if shape.schedule == "1f1b" else ""
        theory = f" (theory: {formula}{measures.theory:.1%})"
    yield text(
        20, 82,
        f"bubble {measures.bubble:.1%}{theory}  |  slowest stage over the mean {measures.imbalance:.2f}  |  "
        f"communication {measures.communication:.1%}",
        size=14,
    )  # fmt: skip


def _legend(y: float, timeline: Timeline) -> Iterator[str]:
    is_divided = timeline.schedule is not None and timeline.schedule.divides_backward
    words = {"receive": "receive and wait", "weights": "weight gradients"}
    if is_divided:
        words["backward"] = "input gradients"
    shown = [kind for kind in COLORS if kind != "exchange" and (kind != "weights" or is_divided)]
    x = 20.0
    for kind in shown:
        label = words.get(kind, kind)
        yield box(x, y - 11, 14, 14, COLORS[kind])
        yield text(x + 20, y, label, fill=_FAINT)
        x += 48 + 6.5 * len(label)


def _axis(y: float, span: float) -> Iterator[str]:
    yield line([(_LEFT, y), (_WIDTH - _RIGHT, y)], _FAINT)
    for milliseconds in ticks(span * 1000, 10):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * milliseconds / (span * 1000)
        yield line([(x, y), (x, y + 4)], _FAINT)
        yield text(x, y + 18, f"{milliseconds:g}", size=11, anchor="middle", fill=_FAINT)
    yield text(20, y + 18, "ms", size=11, fill=_FAINT)


def _table(timeline: Timeline, measures: Measures, ranks: Sequence[int], top: float) -> Iterator[str]:
    """Milliseconds of an iteration and their share, for each rank."""
    yield text(20, top, "ms of an iteration", fill=_FAINT)
    columns = [_LEFT + 92 + 122 * number for number in range(len(SHARES))]
    for x, share in zip(columns, SHARES, strict=True):
        yield text(x, top, share, anchor="end", fill=_FAINT)
    for row, rank in enumerate(ranks, start=1):
        y, spent = top + 24 * row, measures.ranks[rank]
        yield text(20, y, _label(timeline, rank))
        for x, share in zip(columns, SHARES, strict=True):
            yield text(x, y, f"{spent[share] * 1000:.1f}  ({spent[share] / measures.seconds:.0%})", anchor="end")


_COLUMNS, _MAP_WIDTH, _MAP_HEIGHT, _GAP = 3, 380, 150, 24
_MOST_LAYERS, _MOST_CELLS = 12, 20_000
_TOP = 34
_IDLE, _EQUAL, _BUSY = (0x2B, 0x6C, 0xB0), (0xF7, 0xF7, 0xF7), (0xB3, 0x2D, 0x2D)
"""Colors of an expert without tokens, with an equal share, and with ``_LARGEST`` times that."""
_LARGEST = 2.0


def draw_expert_loads(loads: Mapping[int, Mapping[int, Points]]) -> str:
    """The loads of the experts of each layer, from above each iteration's; of many layers some, evenly chosen."""
    layers = _evenly(list(loads), _MOST_LAYERS)
    rows = -(-len(layers) // _COLUMNS)
    cells = max(_MOST_CELLS // sum(len(loads[layer]) for layer in layers), 2)
    parts = [*_load_legend()]
    for place, layer in enumerate(layers):
        x, y = place % _COLUMNS * (_MAP_WIDTH + _GAP), _TOP + place // _COLUMNS * (_MAP_HEIGHT + 2 * _GAP)
        parts += _map(f"layer {layer}", loads[layer], x, y, min(cells, 80))
    width, height = _COLUMNS * (_MAP_WIDTH + _GAP), _TOP + rows * (_MAP_HEIGHT + 2 * _GAP)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='100%' "
        "font-family='Helvetica, Arial, sans-serif'>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _evenly(items: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the items, including the first and the last one."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def _load_legend() -> Iterator[str]:
    yield text(0, 16, "load of an expert, as a multiple of an equal share:")
    for number, load in enumerate((0.0, 0.5, 1.0, 1.5, _LARGEST)):
        x = 320 + 90 * number
        yield box(x, 4, 14, 14, _color(load))
        yield text(x + 20, 16, f"{load:g}" + (" or more" if load == _LARGEST else ""))


def _map(title: str, experts: Mapping[int, Points], x: float, y: float, most: int) -> Iterator[str]:
    """The map of a layer: a row for each expert, a column for one or several logged iterations."""
    iterations = sorted({iteration for points in experts.values() for iteration in points})
    size = -(-len(iterations) // most)
    columns = [iterations[begin : begin + size] for begin in range(0, len(iterations), size)]
    width, height = _MAP_WIDTH / len(columns), _MAP_HEIGHT / len(experts)
    yield text(x, y + 10, f"{title}: experts 0 to {max(experts)}, iterations {iterations[0]:,} to {iterations[-1]:,}")
    for row, (expert, points) in enumerate(experts.items()):
        for column, group in enumerate(columns):
            found = [points[iteration] for iteration in group if iteration in points]
            if found:
                tip = f"{title}, expert {expert}, iteration {group[-1]:,}: {mean(found):.2f}"
                left, top = x + column * width, y + 18 + row * height
                yield box(left, top, width + 0.3, height - (1 if height > 4 else 0), _color(mean(found)), tip)


def _color(load: float) -> str:
    """Blue for no tokens, white for an equal share, red for twice that or more."""
    share = min(load, _LARGEST)
    ends, part = ((_IDLE, _EQUAL), share) if share <= 1 else ((_EQUAL, _BUSY), (share - 1) / (_LARGEST - 1))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends, strict=True))


def text(x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", fill: str = "#222222") -> str:
    """Text with its baseline at ``y``; ``anchor`` is start, middle or end."""
    position = f"x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' text-anchor='{anchor}'"
    return f"<text {position} fill='{fill}'>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """A rectangle."""
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    return f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{fill}'>{title}</rect>"


def line(points: Iterable[tuple[float, float]], stroke: str) -> str:
    """A line through ``points``."""
    path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
    return f"<polyline points='{path}' fill='none' stroke='{stroke}'/>"


def ticks(end: float, count: int) -> list[float]:
    """About ``count`` round numbers from 0 to ``end``, in steps of 1, 2 or 5 times a power of ten."""
    rough = end / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * number for number in range(math.floor(end / step + 1e-9) + 1)]
