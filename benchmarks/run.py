"""Compare this project with other implementations, on the same work, in the same rounds.

    DS_ACCELERATOR=cpu python benchmarks/run.py                 # all that need no GPU
    DS_ACCELERATOR=cpu python benchmarks/run.py training_step   # one, or several

Each benchmark runs in a separate process and alternates between the implementations, round after round. A ratio of
speeds above 1 means that this project is faster. Results are medians with the minimum and maximum of the rounds, and
the median by CPU time, which is disturbed less by other programs. write_figures.py copies the results of --json into
benchmarks/RESULTS.md.
"""

import argparse
import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.tables import as_json, markdown, row  # noqa: E402
from megatron.common.errors import ConfigError  # noqa: E402
from megatron.launch.environment import prepare_environment  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402

MEASURES = (
    "training_step", "whole_program", "flags", "engines", "ddp", "memory", "planner", "published", "bubble",
    "preprocessing", "checkpoints", "generation", "rehearsal", "scale",
)  # fmt: skip
SIZES = {"training_step": tuple("ABC")}
"""Of the models of these measurements."""


def main() -> None:
    """Run one measurement here, or each of several in a process of its own."""
    arguments = _parser().parse_args()
    _check(arguments)
    names = arguments.names or MEASURES
    if len(names) > 1:
        sys.exit(max(_elsewhere(name, arguments.rounds, arguments.json) for name in names))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_environment(os.environ)
    warnings.filterwarnings("ignore", category=FutureWarning)  # of what DeepSpeed and the peers call
    sizes = {"sizes": arguments.sizes} if arguments.sizes else {}
    results = import_module(f"benchmarks.measures.{names[0]}").measure(arguments.rounds, **sizes)
    print(f"## {names[0]}\n\n{markdown([row(result) for result in results])}\n")
    if arguments.json:
        (arguments.json / f"{names[0]}.json").write_text(as_json(names[0], arguments.rounds, results))


def _check(arguments: argparse.Namespace) -> None:
    names = arguments.names
    if unknown := [name for name in names if name not in MEASURES]:
        raise ConfigError(f"there is no measurement {', '.join(unknown)}: choose from {', '.join(MEASURES)}")
    if arguments.sizes:
        if len(names) != 1 or names[0] not in SIZES:
            raise ConfigError(f"--sizes chooses the models of {', '.join(SIZES)}: name one of these and no other")
        if absent := [size for size in arguments.sizes if size not in SIZES[names[0]]]:
            raise ConfigError(f"--sizes {absent[0]}: {names[0]} has {', '.join(SIZES[names[0]])}")
    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds} must be at least 1")
    if arguments.json:
        try:
            arguments.json.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--json {arguments.json}: {error.strerror}; name another folder") from None


def _elsewhere(name: str, rounds: int, folder: Path | None) -> int:
    """The exit code of one measurement in a process of its own; its failure does not stop the others."""
    words = [sys.executable, __file__, name, "--rounds", str(rounds)]
    return subprocess.run([*words, *(["--json", str(folder)] if folder else [])]).returncode


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASURES))
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="measurements of each way")
    parser.add_argument("--json", type=Path, metavar="DIR", help="write the figures of every round there, too")
    sizes = "; ".join(f"{name}: {', '.join(known)}" for name, known in SIZES.items())
    parser.add_argument("--sizes", nargs="+", default=[], metavar="SIZE", help=f"models, of {sizes}")
    return parser


if __name__ == "__main__":
    run_tool(main)
