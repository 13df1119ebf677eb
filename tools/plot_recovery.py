"""Draw when which host of an elastic run trained, and what each recovery took: from elastic.jsonl in its --save folder.

python tools/plot_recovery.py checkpoints/my --output recovery.svg
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import _project_root  # noqa: F401
from _atomic_file import PICTURES, check_picture_name, write_picture

from megatron.common.errors import ConfigError
from megatron.tools.cluster.elastic_parts import STARTS
from megatron.tools.cluster.recovery import SHARES, Events
from megatron.tools.command_line import ToolParser, read_named_number, run_tool

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUPERVISOR = "supervisor"
NOTICING, TRAINING = "until it is noticed", "training"
COLORS = {
    NOTICING: "#c8553d", SHARES["ended"]: "#e0912f", SHARES["examined"]: "#8f6bb3", SHARES["chosen"]: "#2c3e50",
    SHARES["launched"]: "#b9d77a", SHARES["joined"]: "#f2d388", SHARES["loaded"]: "#a7c4dd",
    SHARES["trained"]: "#6ab187", TRAINING: "#3f7cac",
}  # fmt: skip


class Bar(NamedTuple):
    """What a host or the supervisor did for a while."""

    row: str
    what: str
    begin: float
    end: float
    """Seconds since 1970, as ``begin``."""


def main() -> None:
    """Read the flags and the file, draw."""
    parser = ToolParser(__doc__)
    parser.add_argument("save", type=Path, metavar="SAVE", help="the --save folder of an elastic run, or the file")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help=f"picture to write ({', '.join(PICTURES)})"
    )
    parser.add_argument(
        "--fault", nargs="+", action="extend", default=[], metavar="HOST=TIME", help="known faults, in Unix time"
    )
    args = parser.parse_args()
    check_picture_name(args.output, "--output")
    starts = read_starts(args.save / STARTS if args.save.is_dir() else args.save)
    usage = "HOST=TIME with seconds since 1970, such as host-2=1700000000.5"
    faults = [read_named_number(text, "--fault", usage) for text in args.fault]
    write_picture(draw(starts, faults), args.output, "--output")
    for start in starts:
        if "noticed" in start["events"] and "trained" in start["events"]:
            print(Events(start["events"]))


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts of a run, in order. Raises ConfigError if the file has none."""
    try:
        starts = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): name the --save folder of an elastic run") from error
    if not starts or not all(isinstance(start, dict) and "events" in start for start in starts):
        raise ConfigError(f"{path} lists no start with its events: name the --save folder of an elastic run")
    return starts


def bars(starts: Sequence[Mapping[str, Any]]) -> Iterator[Bar]:
    """All bars of a run: the supervisor's between two starts, and those of the hosts of each start."""
    for number, start in enumerate(starts):
        events = start["events"]
        for before, name in (("noticed", "ended"), ("ended", "examined"), ("examined", "chosen")):
            if before in events and name in events:
                yield Bar(SUPERVISOR, SHARES[name], events[before], events[name])
        following = starts[number + 1]["events"] if number + 1 < len(starts) else {}
        last = following.get("noticed", start["ended"])
        known = [name for name in ("chosen", "launched", "joined", "loaded", "trained") if name in events]
        for host in start["hosts"]:
            for before, name in zip(known, known[1:], strict=False):
                yield Bar(host, SHARES[name], events[before], events[name])
            if "trained" in events:
                yield Bar(host, TRAINING, events["trained"], last)


def draw(starts: Sequence[Mapping[str, Any]], faults: Sequence[tuple[str, float]]) -> "Figure":
    """A row for each host and one for the supervisor; seconds to the right, and above each recovery how many."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = list(bars(starts))
    hosts = sorted({bar.row for bar in drawn} - {SUPERVISOR})
    rows = [*hosts, SUPERVISOR]
    if unknown := {host for host, _ in faults} - set(hosts):
        raise ConfigError(f"--fault {min(unknown)}: no start had this host; hosts: {' '.join(hosts)}")
    zero = min(bar.begin for bar in drawn)
    figure = Figure(figsize=(12, 0.5 * len(rows) + 2.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    for bar in drawn:
        axes.barh(rows.index(bar.row), bar.end - bar.begin, left=bar.begin - zero, height=0.62, color=COLORS[bar.what])
    for host, when in faults:
        _draw_fault(axes, starts, rows.index(host), host, when, zero)
    for start in starts:
        _draw_recovery(axes, Events(start["events"]), zero)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -1.1)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    shown = {bar.what for bar in drawn} | ({NOTICING} if faults else set())
    patches = [Patch(color=color, label=what) for what, color in COLORS.items() if what in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _draw_fault(
    axes: "Axes", starts: Sequence[Mapping[str, Any]], row: int, host: str, when: float, zero: float
) -> None:
    """A cross where a host failed, and the time until the supervisor noticed it."""
    noticed = min((t for s in starts if (t := s["events"].get("noticed", 0)) >= when), default=when)
    axes.barh(row, noticed - when, left=when - zero, height=0.62, color=COLORS[NOTICING])
    axes.plot(when - zero, row, "x", color="black", markersize=9, markeredgewidth=2.5)
    axes.annotate(f"{host} fails", (when - zero, row), (4, -14), textcoords="offset points", fontsize=8)


def _draw_recovery(axes: "Axes", events: Events, zero: float) -> None:
    """Above all rows, how long a recovery took."""
    if "noticed" not in events or "trained" not in events:
        return
    begin, end = events["noticed"] - zero, events["trained"] - zero
    axes.annotate("", (begin, -0.6), (end, -0.6), arrowprops={"arrowstyle": "<->", "color": "#444444"})
    axes.text((begin + end) / 2, -0.72, f"{end - begin:.1f} s", ha="center", va="bottom", fontsize=9)


if __name__ == "__main__":
    run_tool(main)
