"""Results as Markdown tables and as JSON, with the machine and versions they were measured on."""

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks.comparing import Comparison, Result

PACKAGES = ("torch", "deepspeed", "transformers")
HEAD = (
    "| workload | compared with | this project | other | ratio (min to max) | by CPU time | goal |\n"
    "|---|---|---|---|---|---|---|"
)


class Row(NamedTuple):
    """A result as a table shows it."""

    what: str
    peer: str
    ours: str
    theirs: str
    ratio: float
    spread: str
    by_cpu: str
    goal: str
    is_reached: bool | None
    """None where there is no goal."""
    least: float | None = None
    most: float | None = None
    is_limit: bool = False
    """Whether the other is a limit of the workload, and of its goals."""


AT_THE_LIMIT = 0.95
"""Share of a limit's speed, or inverse share of its seconds or bytes: a missed goal that is as near is at the limit."""


AT = "at the limit"
MANY = 8
"""More results than these are not named one by one in the table of goals."""


class Limit(NamedTuple):
    """The measured limit of a missed goal."""

    ratio: float
    """Of the limit itself to what the goal compares with."""
    is_reached: bool
    """Whether the limit misses the goal as well, and this project is near it."""


def row(result: Result) -> Row:
    """Medians over the rounds, and the ratio's least and largest."""
    ratios = result.ratios
    ratio, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
    if isinstance(result, Comparison):
        both = result.ours, result.theirs
        ours, theirs = (_speed(result.work / statistics.median(times.wall), result.unit) for times in both)
        least, most, by_cpu = result.goal, None, f"{result.cpu_ratio:.2f}"
    else:
        ours, theirs = (_amount(statistics.median(values), result.unit) for values in (result.ours, result.theirs))
        least, most, by_cpu = result.least, result.most, ""
    goal, is_reached = _goal(least, most), _reached(ratio, least, most)
    figures = result.what, result.peer, ours, theirs, ratio, spread, by_cpu, goal, is_reached
    return Row(*figures, least, most, result.is_limit)


def markdown(rows: Sequence[Row]) -> str:
    """A table, a line for each result."""
    return "\n".join([HEAD, *(_line(r, limit_of(r, rows)) for r in rows)])


def _line(r: Row, limit: Limit | None) -> str:
    peer = f"limit: {r.peer}" if r.is_limit else r.peer
    goal = r.goal if limit is None else f"{r.goal}; {AT if limit.is_reached else 'limit'} {limit.ratio:.2f}"
    return f"| {r.what} | {peer} | {r.ours} | {r.theirs} | **{r.ratio:.2f}** ({r.spread}) | {r.by_cpu} | {goal} |"


def limit_of(r: Row, rows: Sequence[Row]) -> Limit | None:
    """The nearest limit among ``rows`` of the same workload; None if the goal is reached, or there is no limit."""
    beside = [other.ratio for other in rows if other.is_limit and _name(other) == _name(r) and other is not r]
    if r.is_reached is not False or not beside:
        return None
    nearest = min(beside) if r.least is None else max(beside)
    is_near = _reached(nearest, r.least and AT_THE_LIMIT, r.most and 1 / AT_THE_LIMIT)
    ratio = r.ratio / nearest
    return Limit(ratio, bool(is_near) and not _reached(ratio, r.least, r.most))


def goals(name: str, rows: Sequence[Row]) -> list[str]:
    """Lines of the table of goals: the results of one measurement that are held to the same goal, together."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        if r.goal:
            groups.setdefault((r.peer, r.goal), []).append(r)
    return [
        f"| {name} | {peer} | {goal} | {_ratios(group, rows)} | {_count(group, rows)} |"
        for (peer, goal), group in groups.items()
    ]


def as_json(name: str, rounds: int, results: Sequence[Result]) -> str:
    """What was measured, on what, and each figure of each round."""
    return json.dumps({"name": name, "measured_on": measured_on(rounds), "rows": rows_of(results)}, indent=2) + "\n"


def rows_of(results: Sequence[Result]) -> list[dict]:
    """Each result as the table's row, with the figures of each round."""
    return [{**row(result)._asdict(), "measured": asdict(result)} for result in results]


def read_json(file: Path) -> tuple[str, str, list[Row]]:
    """Name of the measurement, what it was made on, and its rows, as ``as_json()`` wrote them."""
    content = json.loads(file.read_text())
    rows = [Row(**{field: entry[field] for field in Row._fields if field in entry}) for entry in content["rows"]]
    return content["name"], content["measured_on"], rows


def measured_on(rounds: int, device: str | None = None) -> str:
    """Date, machine, versions, and how busy the machine was; ``device`` where this process has not loaded torch."""
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES if _is_installed(name)]
    machine = [date.today().isoformat(), device or _device(), f"{os.cpu_count()} cores"]
    return ", ".join([*machine, *versions, f"{rounds} rounds", f"load {os.getloadavg()[0]:.1f}"])


def _device() -> str:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _speed(value: float, unit: str) -> str:
    return f"{_amount(value, unit)}/s"


_SCALES = {
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")),
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")),
}


def _amount(value: float, unit: str) -> str:
    for size, name in _SCALES.get(unit, ()):
        if abs(value) >= size:
            return f"{value / size:,.3g} {name}" if abs(value) < 1000 * size else f"{value / size:,.0f} {name}"
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.3g} {unit}"


def _goal(least: float | None, most: float | None) -> str:
    if least is not None and most is not None:
        return f"{least:.2f} to {most:.2f}"
    return f"at least {least:.2f}" if least is not None else f"at most {most:.2f}" if most is not None else ""


def _reached(ratio: float, least: float | None, most: float | None) -> bool | None:
    if least is None and most is None:
        return None
    return (least is None or ratio >= least) and (most is None or ratio <= most)


def _name(r: Row) -> str:
    return r.what.partition(":")[0]


def _ratios(group: Sequence[Row], rows: Sequence[Row]) -> str:
    """Each ratio by name, or the range of many and the missed ones by name, in full where others have the same name."""
    if len(group) <= MANY:
        return "; ".join(_short(r, limit_of(r, rows), _name(r)) for r in group)
    ratios = [r.ratio for r in group]
    names = [_name(r) for r in group]
    missed = [
        _short(r, limit_of(r, rows), r.what if names.count(_name(r)) > 1 else _name(r))
        for r in group
        if not r.is_reached
    ]
    return "; ".join([f"{len(group)} workloads, **{min(ratios):.2f}** to **{max(ratios):.2f}**", *missed])


def _short(r: Row, limit: Limit | None, name: str) -> str:
    return f"{name} **{r.ratio:.2f}**" + (f" (limit {limit.ratio:.2f})" if limit else "")


def _count(group: Sequence[Row], rows: Sequence[Row]) -> str:
    reached = sum(bool(r.is_reached) for r in group)
    at_limit = sum(limit is not None and limit.is_reached for limit in (limit_of(r, rows) for r in group))
    if len(group) == 1:
        return "yes" if reached else AT if at_limit else "no"
    return f"{reached} of {len(group)}" + (f", {at_limit} {AT}" if at_limit else "")
