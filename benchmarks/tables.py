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
    "| workload | compared with | this project | other | ratio (min to max) | by CPU time |\n|---|---|---|---|---|---|"
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


def row(result: Result) -> Row:
    """Medians over the rounds, and the ratio's least and largest."""
    ratios = result.ratios
    ratio, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}"
    if isinstance(result, Comparison):
        both = result.ours, result.theirs
        ours, theirs = (_speed(result.work / statistics.median(times.wall), result.unit) for times in both)
        by_cpu = f"{result.cpu_ratio:.2f}"
    else:
        ours, theirs = (_amount(statistics.median(values), result.unit) for values in (result.ours, result.theirs))
        by_cpu = ""
    return Row(result.what, result.peer, ours, theirs, ratio, spread, by_cpu)


def markdown(rows: Sequence[Row]) -> str:
    """A table, a line for each result."""
    lines = [
        f"| {r.what} | {r.peer} | {r.ours} | {r.theirs} | **{r.ratio:.2f}** ({r.spread}) | {r.by_cpu} |" for r in rows
    ]
    return "\n".join([HEAD, *lines])


def as_json(name: str, rounds: int, results: Sequence[Result]) -> str:
    """What was measured, on what, and each figure of each round."""
    return json.dumps({"name": name, "measured_on": measured_on(rounds), "rows": rows_of(results)}, indent=2) + "\n"


def rows_of(results: Sequence[Result]) -> list[dict]:
    """Each result as the table's row, with the figures of each round."""
    return [{**row(result)._asdict(), "measured": asdict(result)} for result in results]


def read_json(file: Path) -> tuple[str, str, list[Row]]:
    """Name of the measurement, what it was made on, and its rows, as ``as_json()`` wrote them."""
    content = json.loads(file.read_text())
    rows = [Row(**{field: entry[field] for field in Row._fields}) for entry in content["rows"]]
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
