"""Charts: curves of metrics, timelines of ranks, pipeline schedules, and loads of experts.

matplotlib is slow to import, so functions import it, after flags and files have been checked.
"""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.common.errors import counted
from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, simulate
from megatron.tools.planning.schedule_costs import idle_share
from megatron.tools.reporting.files import Points
from megatron.tools.reporting.timeline import SHARES, Measures, Timeline, pass_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "forward": "#5b9bd5", "backward": "#6ab187", "weights": "#d6a520", "send": "#7a4b2a", "receive": "#dcdcdc",
    "reduce": "#c8553d", "step": "#8f6bb3", "load": "#8a8a8a", "collective": "#2c3e50",
    "all-to-all": "#d6409f", "other": "#cccccc",
}  # fmt: skip
_PASSES = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
_LABELS = {"receive": "receive and wait", "weights": "weight gradients"}
_MOST_ROWS, _MOST_POINTS, _MOST_MAPS, _MOST_COLUMNS, _MOST_CELLS = 32, 800, 12, 80, 10_000
_PANELS_ABREAST = 3


class Panel(NamedTuple):
    """A small plot of one metric."""

    key: str
    title: str
    unit: str
    factor: float = 0.0
    """Multiplier that converts values to ``unit``, shown with an SI prefix; 0 for values without prefix."""


PANELS = (
    Panel("learning_rate", "Learning rate", "rate"),
    Panel("grad_norm", "Gradient norm", "before clipping"),
    Panel("tokens_per_second", "Throughput", "tokens per second"),
    Panel("memory_gb", "Memory of rank 0", "B", 1e9),
    Panel("tflops_per_device", "Speed of each device", "FLOP/s", 1e12),
)
CURVE_KEYS = ("lm_loss", "validation_loss", *(panel.key for panel in PANELS))


class _Bar(NamedTuple):
    """A pass or another event in a row of a chart. Times are milliseconds from the left edge."""

    begin: float
    end: float
    kind: str
    number: int | None = None
    opacity: float = 1.0


_Rows = Sequence[tuple[str, Sequence[_Bar]]]


def as_svg(figure: "Figure") -> str:
    """``figure`` as a self-contained SVG element. Equal figures give equal text."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.sans-serif": ["DejaVu Sans"]}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return file.getvalue()[file.getvalue().index("<svg") :]  # without the XML declaration


def draw(timeline: Timeline, measures: Measures) -> str:
    """Charts of the traced iteration of median duration and of its ideal schedule, and a table of times per rank."""
    from matplotlib.figure import Figure

    iteration = sorted(timeline.iterations, key=timeline.seconds)[(len(timeline.iterations) - 1) // 2]
    ranks = [rank for pipeline in timeline.pipelines for rank in pipeline]
    ranks = (ranks if len(ranks) <= _MOST_ROWS else timeline.pipelines[0])[:_MOST_ROWS]
    labels = [f"rank {rank}, stage {timeline.coordinates[rank]['pipe']}" for rank in ranks]
    measured = list(zip(labels, _measured(timeline, ranks, iteration), strict=True))
    charts: list[tuple[str, _Rows]] = [(f"Ranks in iteration {iteration}, in milliseconds", measured)]
    schedule, is_divided = timeline.schedule, False
    if schedule is not None and schedule.stages > 1:
        seconds, is_divided = pass_seconds(timeline, ranks, iteration), schedule.divides_backward
        charts.append(("The schedule in theory, if every pass takes the mean time", _theory(schedule, seconds)))
    heights = [*(len(rows) + 2 for _, rows in charts), len(ranks) + 1]
    figure = Figure(figsize=(12, 0.3 * sum(heights) + 1.5), layout="constrained")
    *all_axes, table_axes = figure.subplots(len(heights), height_ratios=heights)
    _draw_rows(figure, all_axes, charts, is_divided=is_divided)
    figure.suptitle(_headline(timeline, measures), fontsize=10)
    _draw_table(table_axes, labels, [measures.ranks[rank] for rank in ranks], measures.seconds)
    return as_svg(figure)


def _measured(timeline: Timeline, ranks: Sequence[int], iteration: int) -> list[list[_Bar]]:
    """The bars of each rank: its events in ``iteration``."""
    zero = min(event.begin for rank in ranks for event in timeline.instructions(rank, iteration))
    rows: list[list[_Bar]] = [[] for _ in ranks]
    for bars, rank in zip(rows, ranks, strict=True):
        for event in timeline.events[rank]:
            if event.iteration == iteration and event.layer is None:
                number = event.micro_batch if event.category in _PASSES.values() else None
                times = (1000 * (event.begin - zero), 1000 * (event.end - zero))
                bars.append(_Bar(*times, event.category, number))
    return rows


def _theory(schedule: Schedule, seconds: PassSeconds) -> _Rows:
    """Rows of the simulated schedule, one for each stage; every other chunk of a stage is paler."""
    rows: dict[int, list[_Bar]] = {}
    for stage, action, begin, end in simulate(schedule, seconds):
        opacity = 0.5 if action.chunk // schedule.stages % 2 else 1.0
        bar = _Bar(1000 * begin, 1000 * end, _PASSES[action.kind], action.micro_batch + 1, opacity)
        rows.setdefault(stage, []).append(bar)
    return [(f"stage {stage}", bars) for stage, bars in sorted(rows.items())[:_MOST_ROWS]]


def _draw_rows(
    figure: "Figure", all_axes: Sequence["Axes"], charts: Sequence[tuple[str, _Rows]], *, is_divided: bool
) -> None:
    """Draw a chart on each of ``all_axes``, with a common time axis. Collectives are thin bars inside their passes."""
    from matplotlib.patches import Patch

    length = max(bar.end for _, rows in charts for _, bars in rows for bar in bars)
    for axes, (title, rows) in zip(all_axes, charts, strict=True):
        for y, (_, bars) in enumerate(rows):
            thin = [bar for bar in bars if bar.kind in ("collective", "all-to-all")]
            for shown, extent in (([bar for bar in bars if bar not in thin], (y - 0.4, 0.8)), (thin, (y + 0.2, 0.2))):
                colors = [(_COLORS[bar.kind], bar.opacity) for bar in shown]
                spans = [(bar.begin, bar.end - bar.begin) for bar in shown]
                axes.broken_barh(spans, extent, facecolors=colors, edgecolors="white", linewidth=0.3, clip_on=False)
            for bar in bars:
                if bar.number is not None and bar.end - bar.begin > 0.004 * length * (1 + len(str(bar.number))):
                    axes.text((bar.begin + bar.end) / 2, y, str(bar.number), ha="center", va="center", fontsize=7)
        axes.set_yticks(range(len(rows)), [label for label, _ in rows])
        axes.set(title=title, xlim=(0, length), ylim=(len(rows) - 0.5, -0.5), facecolor="#f4f4f4")
    names = {**_LABELS, "backward": "input gradients"} if is_divided else _LABELS
    kinds = dict.fromkeys(bar.kind for _, rows in charts for _, bars in rows for bar in bars)
    labels = {names.get(kind, kind): _COLORS[kind] for kind in kinds}
    handles = [Patch(color=color, label=label) for label, color in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)


def _headline(timeline: Timeline, measures: Measures) -> str:
    shape, theory = timeline.shape, ""
    if measures.theory is not None:
        formula = "(p-1)/(m+p-1) = " if shape.schedule == "1f1b" else ""
        theory = f" (theory: {formula}{measures.theory:.1%})"
    return (
        f"{counted(shape.stages, 'stage')}, {counted(shape.micro_batches, 'micro-batch')}, {shape.schedule}; medians "
        f"of {counted(len(timeline.iterations), 'iteration')}: {measures.seconds * 1000:.1f} ms each\n"
        f"bubble {measures.bubble:.1%}{theory}  |  slowest stage over the mean {measures.imbalance:.2f}  |  "
        f"communication {measures.communication:.1%}"
    )


def _draw_table(axes: "Axes", labels: Sequence[str], ranks: Sequence[Mapping[str, float]], seconds: float) -> None:
    """Draw a table of milliseconds of an iteration and their shares, with a row for each rank."""
    cells = [[f"{rank[share] * 1000:.1f} ({rank[share] / seconds:.0%})" for share in SHARES] for rank in ranks]
    axes.axis("off")
    axes.table(cells, rowLabels=labels, colLabels=SHARES, loc="center", edges="horizontal")


def draw_schedules(schedules: Sequence[Schedule]) -> str:
    """A chart for each of ``schedules``, in which F, I and W of a stage take equally long, with a common time axis.

    Of a schedule with many micro-batches only the first ones are drawn.
    """
    from matplotlib.figure import Figure

    charts: list[tuple[str, _Rows]] = []
    for schedule in schedules:
        seconds = PassSeconds(*(part / schedule.chunks for part in PassSeconds()))
        chunks = f", {schedule.chunks} model chunks per stage" if schedule.chunks > 1 else ""
        title = f"{schedule.name}{chunks}: {idle_share(schedule, seconds):.1%} of the time idle"
        charts.append((title, _theory(schedule.shortened, seconds)))
    heights = [len(rows) + 2 for _, rows in charts]
    figure = Figure(figsize=(12, 0.28 * sum(heights) + 0.5), layout="constrained")
    all_axes = list(figure.subplots(len(charts), height_ratios=heights, squeeze=False)[:, 0])
    _draw_rows(figure, all_axes, charts, is_divided=any(schedule.divides_backward for schedule in schedules))
    for axes in all_axes:
        axes.set_xticks([])
    return as_svg(figure)


def draw_expert_loads(loads: Mapping[int, Mapping[int, Points]]) -> str:
    """A heat map for each layer (at most ``_MOST_MAPS``), with a row for each expert and columns of iterations.

    Blue is no token, white an equal share, red twice the equal share or more.
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    layers = list(loads)
    if len(layers) > _MOST_MAPS:  # evenly chosen
        layers = [layers[index] for index in np.linspace(0, len(layers) - 1, _MOST_MAPS).round().astype(int)]
    rows, cells = -(-len(layers) // 3), _MOST_CELLS // sum(len(loads[layer]) for layer in layers)
    figure = Figure(figsize=(12, 2 * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, 3, squeeze=False).ravel()
    for axes, layer in zip_longest(grid, layers):
        if layer is None:
            axes.axis("off")
            continue
        iterations = sorted({iteration for points in loads[layer].values() for iteration in points})
        table = [[points.get(iteration, np.nan) for iteration in iterations] for points in loads[layer].values()]
        parts = np.array_split(np.ma.masked_invalid(table), min(len(iterations), _MOST_COLUMNS, cells or 1), axis=1)
        edges = np.linspace(iterations[0], iterations[-1], len(parts) + 1), np.arange(len(table) + 1)
        means = np.ma.stack([part.mean(axis=1) for part in parts], axis=1)
        colors = axes.pcolormesh(*edges, means, cmap=colormaps["RdBu_r"].resampled(21), vmin=0, vmax=2)
        axes.set(title=f"layer {layer}", xlabel="iteration", ylabel="expert")
    figure.colorbar(colors, ax=grid, label="times an equal share", extend="max")
    return as_svg(figure)


def draw_curves(
    runs: Mapping[str, Mapping[str, Points]], baselines: Mapping[str, float] = MappingProxyType({}), title: str = ""
) -> "Figure":
    """The losses, and below them a panel for each other metric of the runs; each run has a color.

    Args:
        runs: name of a run to its points for each of ``CURVE_KEYS``.
        baselines: losses to draw as dashed lines, by name.
        title: title of the figure.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(series[panel.key] for series in runs.values())]
    rows = -(-len(panels) // _PANELS_ABREAST)
    with rc_context({"axes.grid": True, "grid.alpha": 0.3, "text.parse_math": False}):
        figure = Figure(figsize=(12, 5 + 2.5 * rows), dpi=120, layout="constrained")
        figure.suptitle(title, fontsize=15)
        grid = figure.add_gridspec(1 + rows, _PANELS_ABREAST, height_ratios=(2, *[1] * rows))
        loss_axes = figure.add_subplot(grid[0, :])
        _draw_losses(loss_axes, runs, baselines)
        for number, panel in enumerate(panels):
            place = grid[1 + number // _PANELS_ABREAST, number % _PANELS_ABREAST]
            _draw_panel(
                figure.add_subplot(place, sharex=loss_axes), [series[panel.key] for series in runs.values()], panel
            )
    return figure


def _draw_losses(axes: "Axes", runs: Mapping[str, Mapping[str, Points]], baselines: Mapping[str, float]) -> None:
    """Draw training losses as lines, validation losses as lines with dots, and baselines as dashed lines."""
    for number, (name, series) in enumerate(runs.items()):
        prefix = f"{name}: " if len(runs) > 1 else ""
        training, validation = series["lm_loss"], series["validation_loss"]
        if training:
            _plot(axes, training, color=f"C{number}", alpha=0.6, label=f"{prefix}training")
        if validation:
            final = list(validation.values())[-1]
            label = f"{prefix}validation, {final:.3f} at the end (perplexity {_perplexity(final)})"
            _plot(axes, validation, color=f"C{number}", linewidth=2, marker="o", label=label)
    for number, (name, loss) in enumerate(baselines.items()):
        style = ("--", ":", "-.")[number % 3]
        axes.axhline(loss, color="black", alpha=0.7, linestyle=style, label=f"{name}, {loss:.3f}")
    axes.set(title="Loss", xlabel="iteration", ylabel="cross-entropy (nats per token)")
    axes.legend()


def _draw_panel(axes: "Axes", curves: Sequence[Points], panel: Panel) -> None:
    """Draw one metric of all runs."""
    from matplotlib.ticker import EngFormatter

    for number, points in enumerate(curves):
        if not points:
            continue
        values = {iteration: value * (panel.factor or 1) for iteration, value in points.items()}
        _plot(axes, values, color=f"C{number}")
    axes.set(title=panel.title, xlabel="iteration", ylabel="" if panel.factor else panel.unit)
    axes.set_ylim(bottom=0)
    if panel.factor:
        axes.yaxis.set_major_formatter(EngFormatter(panel.unit))


def _plot(axes: "Axes", points: Points, **style: Any) -> None:
    """Draw a line through the points; adjacent points are averaged if there are more than ``_MOST_POINTS``."""
    import numpy as np

    parts = np.array_split(list(points.items()), min(len(points), _MOST_POINTS))
    means = np.array([part.mean(axis=0) for part in parts])
    marker = {"marker": "o"} if len(points) == 1 else {}
    axes.plot(means[:, 0], means[:, 1], **marker | style)


def _perplexity(loss: float) -> str:
    """The exponential of a loss, as text."""
    return f"{math.exp(loss):.4g}" if loss < 700 else "beyond floating point"
