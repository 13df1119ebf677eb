"""Pictures: ratios of benchmarks, and curves of growth and of long sequences."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.tables import Row

COLORS = {True: "tab:green", False: "tab:red", None: "tab:gray"}
"""Of a goal that is reached, one that is missed, and of a result without a goal."""


def draw(found: Mapping[str, Sequence[Row]], title: str, file: Path) -> None:
    """A line for each row of each measurement: its ratio, from the least to the largest round, and its goal."""
    from matplotlib.figure import Figure

    lines = [(name, row) for name, rows in found.items() for row in rows]
    figure = Figure(figsize=(14, 0.28 * len(lines) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, (_, row) in enumerate(lines):
        spread, goals = _numbers(row.spread), _numbers(row.goal)
        axes.plot(spread, [place] * len(spread), color=COLORS[row.is_reached], linewidth=2, alpha=0.4)
        axes.plot(row.ratio, place, "o", color=COLORS[row.is_reached])
        axes.plot(goals, [place] * len(goals), "k|", markersize=9)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(lines)), [f"{name}: {row.what.partition(':')[0]} / {row.peer}" for name, row in lines])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ratio; black marks are goals")
    figure.suptitle(title)
    figure.savefig(file)


def draw_growth(curves: Sequence[Mapping[str, Any]], file: Path) -> None:
    """A plot for each curve of ``measures/growth.py``: what was measured, and theory's line, with both exponents."""
    from matplotlib.figure import Figure

    columns = 3
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    plots = figure.subplots(rows, columns, squeeze=False).flat
    for curve, axes in zip(curves, plots, strict=False):
        sizes, measured, theory = zip(*curve["points"], strict=True)
        ours, theirs = median(curve["ours"]), curve["theirs"][0]
        axes.loglog(sizes, theory, "--", color="gray", label=f"theory, exponent {theirs:.2f}")
        axes.loglog(sizes, measured, "o-", label=f"measured, {ours:.2f}")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.set(xlabel=curve["axis"], ylabel=curve["amount"])
        axes.legend(frameon=False, fontsize=8)
    for axes in plots:
        axes.set_visible(False)
    figure.savefig(file)


def draw_long_sequences(curves: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Memory, with the planner's line, and CPU time per token, of each kind of ``measures/long_sequences.py``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    for curve in curves:
        kind, sizes = curve["what"].partition(":")[0], [point[0] for point in curve["points"]]
        if curve["amount"].startswith("memory"):
            (line,) = memory.loglog(sizes, [point[1] / 1e6 for point in curve["points"]], "o-", label=kind)
            memory.loglog(sizes, [point[2] / 1e6 for point in curve["points"]], "--", color=line.get_color())
        else:
            time.semilogx(sizes, [point[1] / point[0] * 1e6 for point in curve["points"]], "o-", label=kind)
    for axes, amount in ((memory, "memory of a rank, MB; dashed: planned"), (time, "CPU time of a rank per token, us")):
        ticks = sorted({point[0] for curve in curves for point in curve["points"]})
        axes.set_xticks(ticks, [f"{tick / 1024:g}k" for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="tokens of a sequence", ylabel=amount)
    time.set_ylim(bottom=0)
    memory.legend(frameon=False, fontsize=8)
    figure.savefig(file)


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+\.\d+", text)]
