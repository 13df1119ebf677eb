"""Compare the speed of two commits, side by side in one run.

    DS_ACCELERATOR=cpu python benchmarks/compare.py HEAD~5 HEAD training_step engines
    DS_ACCELERATOR=cpu python benchmarks/compare.py HEAD . training_step      # . is the working tree

Each commit is unpacked into a temporary folder, where its own benchmarks/run.py measures. The two take turns. A ratio
above 1 means that the second commit is faster. The last column is the same ratio of the implementations that run.py
compares with: they did not change, so it shows how much the machine wavered. The exit code is 1 if a workload is slower
by more than --allow, by CPU time where there is one.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.common.errors import ConfigError  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

SLOWER = 1
"""Exit code if the second commit is slower."""
HEAD = ("workload", "second / first", "min to max", "by CPU time", "others")
Results = Mapping[str, Any]
"""The rows of one measurement in one turn, as ``run.py --json`` writes them, by workload and peer."""


class Line(NamedTuple):
    """One workload of both commits. Each ratio is the second's speed as a multiple of the first's."""

    workload: str
    wall: list[float]
    """In each turn."""
    cpu: list[float]
    """The same by CPU time; empty where it was not measured."""
    others: list[float]
    """Of what the workload is compared with."""

    @property
    def ratio(self) -> float:
        """What decides whether the second commit is slower."""
        return statistics.median(self.cpu or self.wall)


def main() -> None:
    """Unpack both, measure in turns, and print a table."""
    arguments = _parser().parse_args()
    if arguments.turns < 1 or arguments.rounds < 1:
        raise ConfigError("--turns and --rounds must be at least 1")
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        trees = [_tree(revision, Path(folder) / str(n)) for n, revision in enumerate(arguments.revisions)]
        lines = [line for name in arguments.names for line in _compared(name, trees, arguments)]
    print(table(lines))
    slower = [line.workload for line in lines if line.ratio < 1 - arguments.allow]
    print(f"{len(slower)} of {len(lines)} workloads are slower by more than {arguments.allow:.0%}", *slower, sep="\n  ")
    sys.exit(SLOWER if slower else 0)


def compared(first: Sequence[Results], second: Sequence[Results]) -> Iterator[Line]:
    """The workloads that both commits have, turn by turn. A workload with several peers is one line."""
    common = [key for key in first[0] if key in second[0]]
    for workload in dict.fromkeys(workload for workload, _ in common):
        keys = [key for key in common if key[0] == workload and _is_speed(first[0][key])]
        if not keys:
            continue
        wall, cpu, others = [], [], []
        for before, after in zip(first, second, strict=True):
            wall.append(_ratio(before[keys[0]], after[keys[0]], "ours", "wall"))
            others += [_ratio(before[key], after[key], "theirs", "wall") for key in keys]
            if _has_cpu_time(before[keys[0]]):
                cpu.append(_ratio(before[keys[0]], after[keys[0]], "ours", "cpu"))
        yield Line(workload, wall, cpu, others)


def table(lines: Sequence[Line]) -> str:
    """Aligned columns, a line for each workload."""
    rows = [HEAD, *(_row(line) for line in lines)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEAD))]
    return "\n".join("  ".join(word.ljust(w) for word, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(line: Line) -> tuple[str, ...]:
    spread = f"{min(line.wall):.2f} to {max(line.wall):.2f}"
    cpu, others = (f"{statistics.median(ratios):.2f}" if ratios else "" for ratios in (line.cpu, line.others))
    return line.workload, f"{statistics.median(line.wall):.2f}", spread, cpu, others


def _compared(name: str, trees: Sequence[Path], arguments: Any) -> Iterator[Line]:
    found: tuple[list[Results], list[Results]] = [], []
    for turn in range(arguments.turns):
        print(f"{name}: turn {turn + 1} of {arguments.turns}", file=sys.stderr, flush=True)
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            found[which].append(_measured(name, trees[which], arguments.rounds))
    return compared(*found)


def _measured(name: str, tree: Path, rounds: int) -> Results:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "benchmarks/run.py", name, "--rounds", str(rounds), "--json", folder]
        ended = subprocess.run(words, cwd=tree, capture_output=True, text=True)
        file = Path(folder) / f"{name}.json"
        if ended.returncode or not file.exists():
            said = ended.stderr.strip().splitlines() or ["no message"]
            raise ConfigError(f"{name} of {tree}: exit code {ended.returncode}: {said[-1]}")
        return {(row["what"], row["peer"]): row for row in json.loads(file.read_text())["rows"]}


def _tree(revision: str, folder: Path) -> Path:
    """The files of ``revision``, in ``folder``; ``.`` is this working tree itself."""
    if revision == ".":
        return ROOT
    folder.mkdir()
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise ConfigError(f"{revision}: {archive.stderr.decode().strip().splitlines()[-1]}; name a commit or .")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def _is_speed(row: Mapping[str, Any]) -> bool:
    """Times of work, or a quantity of seconds; of bytes and others it is not known whether more or less is better."""
    measured = row["measured"]
    return isinstance(measured["ours"], dict) or measured["unit"] == "s"


def _has_cpu_time(row: Mapping[str, Any]) -> bool:
    ours = row["measured"]["ours"]
    return isinstance(ours, dict) and all(ours["cpu"])


def _ratio(before: Mapping[str, Any], after: Mapping[str, Any], whose: str, clock: str) -> float:
    """Of the speeds."""
    first, second = (
        statistics.median(values[clock] if isinstance(values, dict) else values)
        for values in (row["measured"][whose] for row in (before, after))
    )
    return first / second


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("revisions", nargs=2, metavar="REVISION", help="a commit of this repository, or .")
    parser.add_argument("names", nargs="+", metavar="NAME", help="a measurement of benchmarks/run.py")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="how often each commit is measured")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of run.py in each turn")
    parser.add_argument("--allow", type=float, default=0.05, metavar="SHARE", help="how much slower is accepted")
    return parser


if __name__ == "__main__":
    run_tool(main)
