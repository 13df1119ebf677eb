"""A timeline as a picture: what each rank did in one iteration, what theory would have it do, and the figures."""

from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import NamedTuple

from megatron.parallel.pipeline.schedule import timed_passes
from megatron.tools.reporting.measure import SHARES, Measures
from megatron.tools.reporting.svg import FAINT, box, line, picture, text, ticks
from megatron.training.timeline import Event, Timeline

COLOURS = {
    "forward": "#5b9bd5", "backward": "#6ab187", "send": "#e0912f", "receive": "#f8e3b0", "exchange": "#f8e3b0",
    "reduce": "#c8553d", "step": "#8f6bb3", "load": "#8a8a8a", "collective": "#2c3e50",
}  # fmt: skip
_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 1200, 130, 20, 30, 22
_MOST_ROWS = 32


class _Bar(NamedTuple):
    """Something on a row, in seconds from the left edge."""

    begin: float
    end: float
    kind: str
    number: int | None
    told: str


def draw(timeline: Timeline, measures: Measures) -> str:
    """The picture as SVG text, of the traced iteration that took the median time."""
    iteration = _median_iteration(timeline)
    ranks = _shown(timeline)
    rows = [(_label(timeline, rank), _measured(timeline, rank, ranks, iteration)) for rank in ranks]
    theory = _theory(timeline, ranks, iteration) if measures.theory is not None and timeline.shape.stages > 1 else []
    span = max(bar.end for _, bars in (*rows, *theory) for bar in bars)
    parts = [text(20, 32, f"What the ranks did in iteration {iteration}", size=20), *_figures(timeline, measures)]
    parts += _legend(116)
    top = 150.0
    parts += _rows(rows, top, span)
    top += _ROW * len(rows) + 8
    parts += _axis(top, span)
    top += 46
    if theory:
        parts.append(text(20, top, "What theory says, where every pass takes as long as the mean one", size=15))
        parts += _rows(theory, top + 14, span)
        top += 14 + _ROW * len(theory) + 34
    parts += _table(timeline, measures, ranks, top)
    return picture(_WIDTH, top + 24 * (len(ranks) + 1) + 20, parts)


def _median_iteration(timeline: Timeline) -> int:
    def seconds(iteration: int) -> float:
        events = [e for rank in range(len(timeline.coordinates)) for e in timeline.instructions(rank, iteration)]
        return max(e.end for e in events) - min(e.begin for e in events)

    ordered = sorted(timeline.iterations, key=seconds)
    return ordered[(len(ordered) - 1) // 2]


def _shown(timeline: Timeline) -> list[int]:
    """All ranks, or one pipeline where they are too many."""
    everyone = [rank for pipeline in timeline.pipelines for rank in pipeline]
    return (everyone if len(everyone) <= _MOST_ROWS else timeline.pipelines[0])[:_MOST_ROWS]


def _label(timeline: Timeline, rank: int) -> str:
    return f"rank {rank}, stage {timeline.coordinates[rank]['pipe']}"


def _measured(timeline: Timeline, rank: int, ranks: Sequence[int], iteration: int) -> list[_Bar]:
    zero = min(event.begin for other in ranks for event in timeline.instructions(other, iteration))
    events = [event for event in timeline.events[rank] if event.iteration == iteration and event.layer is None]
    return [_bar(event, zero) for event in sorted(events, key=lambda event: event.begin)]  # what is inside comes last


def _bar(event: Event, zero: float) -> _Bar:
    which = f" of micro-batch {event.micro_batch}" if event.micro_batch else ""
    told = f"{event.name}{which}: {event.seconds * 1000:.2f} ms"
    if event.collective:
        return _Bar(event.begin - zero, event.end - zero, "collective", None, f"{event.collective} in {told}")
    number = event.micro_batch if event.kind in ("forward", "backward") else None
    return _Bar(event.begin - zero, event.end - zero, event.kind, number, told)


def _theory(timeline: Timeline, ranks: Sequence[int], iteration: int) -> list[tuple[str, list[_Bar]]]:
    """The passes of each stage, each as early as those it builds on allow."""
    shape = timeline.shape
    seconds = {
        kind: mean(
            median(e.seconds for e in timeline.instructions(rank, iteration) if e.kind == kind) for rank in ranks
        )
        for kind in ("forward", "backward")
    }
    bars: list[list[_Bar]] = [[] for _ in range(shape.stages)]
    for stage, number, is_forward, begin, end in timed_passes(shape.stages, shape.micro_batches, **seconds):
        kind = "forward" if is_forward else "backward"
        bars[stage].append(_Bar(begin, end, kind, number, f"{kind} of micro-batch {number}"))
    return [(f"stage {stage}", of_stage) for stage, of_stage in enumerate(bars[:_MOST_ROWS])]


def _rows(rows: Sequence[tuple[str, list[_Bar]]], top: float, span: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / span
    for number, (label, bars) in enumerate(rows):
        y = top + number * _ROW
        yield text(20, y + 16, label)
        yield box(_LEFT, y, _WIDTH - _LEFT - _RIGHT, _BAR, "#f4f4f4")
        for bar in bars:
            x, width = _LEFT + bar.begin * scale, (bar.end - bar.begin) * scale
            height = _BAR / 4 if bar.kind == "collective" else _BAR
            # A hair between neighbours, where there is room for one.
            yield box(x, y + _BAR - height, max(width - 0.6, 0.4), height, COLOURS.get(bar.kind, "#cccccc"), bar.told)
            if bar.number is not None and width > 7 * len(str(bar.number)) + 3:
                yield text(x + width / 2, y + 15, str(bar.number), size=11, anchor="middle", fill="white")


def _figures(timeline: Timeline, measures: Measures) -> Iterator[str]:
    shape = timeline.shape
    yield text(
        20, 58,
        f"{_count(shape.stages, 'stage')}, {_count(shape.micro_batches, 'micro-batch')}, {shape.schedule}; medians of "
        f"{_count(len(timeline.iterations), 'iteration')}: {measures.seconds * 1000:.1f} ms each",
        size=14,
    )  # fmt: skip
    theory = ""
    if measures.theory is not None:
        theory = f" (theory: (p-1)/(m+p-1) = {measures.theory:.1%})"
    yield text(
        20, 82,
        f"bubble {measures.bubble:.1%}{theory}  |  slowest stage over the mean {measures.imbalance:.2f}  |  "
        f"communication {measures.communication:.1%}",
        size=14,
    )  # fmt: skip


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def _legend(y: float) -> Iterator[str]:
    shown = {kind: colour for kind, colour in COLOURS.items() if kind != "exchange"}
    for number, (kind, colour) in enumerate(shown.items()):
        x = 20 + 130 * number
        yield box(x, y - 11, 14, 14, colour)
        yield text(x + 20, y, "receive and wait" if kind == "receive" else kind, fill=FAINT)


def _axis(y: float, span: float) -> Iterator[str]:
    yield line([(_LEFT, y), (_WIDTH - _RIGHT, y)], FAINT, 1)
    for milliseconds in ticks(0, span * 1000, 10):
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * milliseconds / (span * 1000)
        yield line([(x, y), (x, y + 4)], FAINT, 1)
        yield text(x, y + 18, f"{milliseconds:g}", size=11, anchor="middle", fill=FAINT)
    yield text(20, y + 18, "ms", size=11, fill=FAINT)


def _table(timeline: Timeline, measures: Measures, ranks: Sequence[int], top: float) -> Iterator[str]:
    """Milliseconds of an iteration, and their share, for each rank."""
    yield text(20, top, "ms of an iteration", fill=FAINT)
    columns = [_LEFT + 110 + 122 * number for number in range(len(SHARES))]
    for x, share in zip(columns, SHARES, strict=True):
        yield text(x, top, share, anchor="end", fill=FAINT)
    for row, rank in enumerate(ranks, start=1):
        y, spent = top + 24 * row, measures.ranks[rank]
        yield text(20, y, _label(timeline, rank))
        for x, share in zip(columns, SHARES, strict=True):
            yield text(x, y, f"{spent[share] * 1000:.1f}  ({spent[share] / measures.seconds:.0%})", anchor="end")
