"""Draw the metrics files of one or more runs: loss, learning rate, gradient norm and speed over the iterations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import _project_root  # noqa: F401
from _atomic_file import PICTURES, check_picture_name, write_picture

from megatron.tools.command_line import ToolParser, read_named_number, run_tool
from megatron.tools.reporting.files import Points, read_series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """One of the small plots below the loss."""

    key: str
    title: str
    unit: str


PANELS = (
    Panel("learning_rate", "Learning rate", "rate"),
    Panel("grad_norm", "Gradient norm", "global L2 norm"),
    Panel("tokens_per_second", "Speed", "tokens per second"),
)
KEYS = ("lm_loss", "validation_loss", *(panel.key for panel in PANELS))


@dataclass(frozen=True)
class Run:
    """The metrics of one file."""

    name: str
    series: Mapping[str, Points]
    """The points of each of ``KEYS``."""


def main() -> None:
    """Read the flags and the files, draw."""
    parser = ToolParser(__doc__)
    parser.add_argument("metrics", type=Path, nargs="+", metavar="METRICS", help="files that --metrics-file wrote")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help=f"picture to write ({', '.join(PICTURES)})"
    )
    parser.add_argument(
        "--baseline", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="loss to draw as a dashed line"
    )
    parser.add_argument("--title", default="Training", help="title of the picture")
    args = parser.parse_args()
    check_picture_name(args.output, "--output")
    usage = "NAME=VALUE with a number, such as unigram=6.2"
    baselines = dict(read_named_number(text, "--baseline", usage) for text in args.baseline)
    runs = [
        Run(name, read_series(path, KEYS)) for name, path in zip(run_names(args.metrics), args.metrics, strict=True)
    ]
    write_picture(draw(runs, baselines, args.title), args.output, "--output")
    print(f"{args.output}: {summary(runs)}")


def run_names(paths: Sequence[Path]) -> list[str]:
    """A name for each file: its own, or its path where two files have the same."""
    names = [path.stem for path in paths]
    return [
        name if names.count(name) == 1 else str(path.with_suffix("")) for name, path in zip(names, paths, strict=True)
    ]


def draw(runs: Sequence[Run], baselines: Mapping[str, float], title: str) -> "Figure":
    """The loss above, the panels below; a color for each run."""
    # Slow to import, and not needed to find mistakes in flags and files. Figure alone needs no display.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 11, "axes.titlesize": 12, "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
        figure.suptitle(title, fontsize=15)
        grid = figure.add_gridspec(2, len(PANELS), height_ratios=(2, 1))
        loss_axes = figure.add_subplot(grid[0, :])
        draw_losses(loss_axes, runs, baselines)
        for column, panel in enumerate(PANELS):
            draw_panel(figure.add_subplot(grid[1, column], sharex=loss_axes), runs, panel)
    return figure


def draw_losses(axes: "Axes", runs: Sequence[Run], baselines: Mapping[str, float]) -> None:
    """Training losses as lines, validation losses as lines with dots, baselines dashed."""
    for number, run in enumerate(runs):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        training, validation = run.series["lm_loss"], run.series["validation_loss"]
        if training:
            plot(axes, training, color=f"C{number}", alpha=0.6, label=f"{prefix}training")
        if validation:
            final = list(validation.values())[-1]
            label = f"{prefix}validation, {final:.3f} at the end (perplexity {perplexity(final)})"
            plot(axes, validation, color=f"C{number}", linewidth=2, marker="o", label=label)
    for number, (name, loss) in enumerate(baselines.items()):
        label = f"{name}, {loss:.3f}"
        axes.axhline(loss, color="black", alpha=0.7, linestyle=("--", ":", "-.")[number % 3], label=label)
    axes.set(title="Loss", xlabel="iteration", ylabel="cross-entropy (nats per token)")
    axes.legend()


def draw_panel(axes: "Axes", runs: Sequence[Run], panel: Panel) -> None:
    """One quantity of all runs."""
    for number, run in enumerate(runs):
        plot(axes, run.series[panel.key], color=f"C{number}")
    axes.set(title=panel.title, xlabel="iteration", ylabel=panel.unit)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))


def plot(axes: "Axes", points: Points, **style: object) -> None:
    """A line through the points; a dot, if there is one point only."""
    marker = {"marker": "o"} if len(points) == 1 else {}
    axes.plot(list(points), list(points.values()), **marker | style)


def perplexity(loss: float) -> str:
    """The exponential of a loss, as text."""
    return f"{math.exp(loss):.4g}" if loss < 700 else "beyond floating point"


def summary(runs: Sequence[Run]) -> str:
    """The last losses of each run."""
    parts = []
    for run in runs:
        for key in ("lm_loss", "validation_loss"):
            for iteration, loss in list(run.series[key].items())[-1:]:
                parts.append(f"{run.name} {key} {loss:.4f} at iteration {iteration}")
    return ", ".join(parts)


if __name__ == "__main__":
    run_tool(main)
