"""Curves of metrics files: the losses of one or several runs, learning rate, gradient norm, speed and memory."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.common.units import prefix_of
from megatron.tools.reporting.files import Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_POINTS = 800
_COLUMNS = 3


class Panel(NamedTuple):
    """One of the small plots."""

    key: str
    title: str
    unit: str
    factor: float = 0.0
    """The value in ``unit``, which gets the prefix that fits; 0 for a unit without prefix."""


PANELS = (
    Panel("learning_rate", "Learning rate", "rate"),
    Panel("grad_norm", "Gradient norm", "before clipping"),
    Panel("tokens_per_second", "Throughput", "tokens per second"),
    Panel("memory_gb", "Memory of rank 0", "B", 1e9),
    Panel("tflops_per_device", "Speed of each device", "FLOP/s", 1e12),
)
CURVE_KEYS = ("lm_loss", "validation_loss", *(panel.key for panel in PANELS))


def draw_curves(
    runs: Mapping[str, Mapping[str, Points]], baselines: Mapping[str, float] = MappingProxyType({}), title: str = ""
) -> "Figure":
    """The loss above, and a panel for each other quantity that a run has; a color for each run.

    Args:
        runs: by name, the points of each of ``CURVE_KEYS``.
        baselines: losses to draw as dashed lines.
        title: of the whole picture.
    """
    # Slow to import, and not needed to find mistakes in flags and files. Figure alone needs no display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(series[panel.key] for series in runs.values())]
    rows = -(-len(panels) // _COLUMNS)
    with rc_context({"axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(12, 5 + 2.5 * rows), dpi=120, layout="constrained")
        figure.suptitle(title, fontsize=15)
        grid = figure.add_gridspec(1 + rows, _COLUMNS, height_ratios=(2, *[1] * rows))
        loss_axes = figure.add_subplot(grid[0, :])
        _draw_losses(loss_axes, runs, baselines)
        for number, panel in enumerate(panels):
            place = grid[1 + number // _COLUMNS, number % _COLUMNS]
            _draw_panel(
                figure.add_subplot(place, sharex=loss_axes), [series[panel.key] for series in runs.values()], panel
            )
    return figure


def _draw_losses(axes: "Axes", runs: Mapping[str, Mapping[str, Points]], baselines: Mapping[str, float]) -> None:
    """Training losses as lines, validation losses as lines with dots, baselines dashed."""
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
    """One quantity of all runs."""
    scale, prefix = 1.0, ""
    if panel.factor:
        fitting, prefix = prefix_of(panel.factor * max(max(points.values(), default=0.0) for points in curves))
        scale = panel.factor / fitting
    for number, points in enumerate(curves):
        _plot(axes, {iteration: value * scale for iteration, value in points.items()}, color=f"C{number}")
    axes.set(title=panel.title, xlabel="iteration", ylabel=f"{prefix}{panel.unit}")
    axes.set_ylim(bottom=0)


def _plot(axes: "Axes", points: Points, **style: Any) -> None:
    """A line through the points; adjacent points are averaged if there are more than can be distinguished."""
    items = list(points.items())
    size = -(-len(items) // _MOST_POINTS) or 1
    groups = [list(zip(*items[begin : begin + size], strict=True)) for begin in range(0, len(items), size)]
    marker = {"marker": "o"} if len(groups) == 1 else {}
    xs, ys = ([mean(group[axis]) for group in groups] for axis in (0, 1))
    axes.plot(xs, ys, **marker | style)


def _perplexity(loss: float) -> str:
    """The exponential of a loss, as text."""
    return f"{math.exp(loss):.4g}" if loss < 700 else "beyond floating point"
