"""Measure the suite against named peers, on the same work, in the same rounds.

    DS_ACCELERATOR=cpu python benchmarks/run.py                 # all of it
    DS_ACCELERATOR=cpu python benchmarks/run.py training_step   # one, or several

Each measurement runs in a process of its own, its ways in turn, round after round. A ratio above 1 means that the
suite is faster; beside the median stand the least and the largest of the rounds, and the median by processor time,
which other work on the machine disturbs less.
"""

import argparse
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.comparing import as_json, markdown  # noqa: E402
from megatron.cli import ToolParser, run_tool  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402

MEASURES = ("training_step", "engines", "two_cores", "start_up", "preprocessing", "index_maps", "sample_reads")


def main() -> int:
    """Run one measurement here, or each of several in a process of its own."""
    arguments = _parser().parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    names = arguments.names or MEASURES
    if len(names) > 1:
        return _one_by_one(names, arguments)
    prepare_environment(os.environ)
    comparisons = import_module(f"benchmarks.measures.{names[0]}").measure(arguments.rounds)
    print(f"## {names[0]}\n\n{markdown(comparisons)}\n")
    if arguments.json:
        (arguments.json / f"{names[0]}.json").write_text(as_json(comparisons) + "\n")
    return 0


def _one_by_one(names: list[str], arguments: argparse.Namespace) -> int:
    kept = ["--json", str(arguments.json)] if arguments.json else []
    codes = [
        subprocess.run([sys.executable, __file__, name, "--rounds", str(arguments.rounds), *kept]).returncode
        for name in names
    ]
    return max(codes)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("names", nargs="*", choices=[*MEASURES, []], metavar="NAME", help=", ".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="measurements of each way")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write the seconds of every round there, too")
    return parser


if __name__ == "__main__":
    run_tool(main)
