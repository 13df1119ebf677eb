"""Which faults of parallel code does tools/verify_layout.py find, and does it say where they are?

    python -m benchmarks.mutations.run                     # all, written into docs/verified-faults.md
    python -m benchmarks.mutations.run "norms not summed"  # some, printed only
    python -m benchmarks.mutations.run --healthy           # layouts without a fault, of which none may be reported

Each mutation is planted in the ranks of a tiny model, trained on its layout. It is found if the layout differs from one
process, and attributed if the operation that is named is the one that it breaks.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.mutations.table import HEALTHY, MODELS, MUTATIONS, Mutation  # noqa: E402
from megatron.common.errors import ConfigError, LaunchError  # noqa: E402
from megatron.tools.command_line import ToolParser, run_tool  # noqa: E402
from megatron.tools.verify.bisect import Bisection, Bisector  # noqa: E402
from megatron.tools.verify.compare import Bounds  # noqa: E402
from megatron.tools.verify.request import Request, make_request, parse_layout  # noqa: E402

PAGE = ROOT / "docs" / "verified-faults.md"
MARK = "<!-- mutations -->"
_SIZES = (
    "--hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16 --mock-data --num-workers 0 "
    "--make-vocab-size-divisible-by 4 --lr 1e-3 --batch-size 2 --global-batch-size 8"
)
_LAYERS = "--num-layers 4 --seq-length 16 --vocab-size 92"
_OF_T5 = "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 16 --decoder-seq-length 8 --vocab-size 192"
_ITERATIONS = 2


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation."""

    mutation: Mutation
    is_found: bool
    bisection: Bisection | None
    seconds: float

    @property
    def is_attributed(self) -> bool:
        """Whether the operation that it breaks is named."""
        return self.bisection is not None and self.mutation.expected in self.bisection.finding.operation

    def __str__(self) -> str:
        result = "attributed" if self.is_attributed else "found" if self.is_found else "not found"
        text = f"{self.mutation.name}: {result} ({self.seconds:.0f} s)"
        return text if self.bisection is None else f"{text}\n{self.bisection}"


def request_for(model: str, dtype: str = "fp32", **environ: str) -> Request:
    """The run of a tiny model of this name."""
    program = f"pretrain_{model}" if model in ("bert", "t5") else "pretrain_gpt2"
    os.environ["PROGRAM"] = program
    sizes = _OF_T5 if model == "t5" else _LAYERS
    words = f"{_SIZES} {sizes} {MODELS[model]}".split() + ([f"--{dtype}"] if dtype != "fp32" else [])
    return make_request(words, _ITERATIONS, None, {**os.environ, **environ}, ROOT / "benchmarks/mutations/pretrain.py")


def try_mutations(mutations: Sequence[Mutation]) -> Iterator[Outcome]:
    """Plant one after the other. Models are trained on one process once each."""
    bisectors: dict[str, Bisector] = {}
    for mutation in mutations:
        start = time.monotonic()
        request = request_for(mutation.model, MUTATION=mutation.name)
        shared = bisectors.setdefault(mutation.model, Bisector(request, Bounds.of("fp32"), 240))
        bisector, layout = replace(shared, request=request), parse_layout(mutation.layout)
        request.run(layout)
        try:
            differences = bisector.differences(layout)
        except LaunchError as error:
            print(error)
            yield Outcome(mutation, False, None, time.monotonic() - start)
            continue
        is_found = not differences.agree
        bisection = bisector.bisect(layout, differences.iteration) if is_found else None
        yield Outcome(mutation, is_found, bisection, time.monotonic() - start)


def false_alarms() -> Iterator[str]:
    """Train layouts without a fault; yields a line for each, and whether something is reported."""
    for model, dtype in ((model, dtype) for model in HEALTHY for dtype in ("fp32", "bf16")):
        bisector = Bisector(request_for(model, dtype), Bounds.of(dtype), 240)
        for name in HEALTHY[model].split():
            zero = "" if dtype == "fp32" or "zero" in name else "-zero1"
            finding = bisector.finding(parse_layout(name + zero), 1, locates=True)
            yield f"{model} {dtype} {name}{zero}: {finding or 'healthy'}"


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table for the page."""
    attributed = sum(outcome.is_attributed for outcome in outcomes)
    found = sum(outcome.is_found for outcome in outcomes)
    lines = [
        f"Of {len(outcomes)} mutations {found} are found, and {attributed} of them attributed to what they break.\n",
        "| fault | layout | smallest layout that differs | found | reported as |",
        "|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        mutation, bisection = outcome.mutation, outcome.bisection
        result = "attributed" if outcome.is_attributed else "found" if outcome.is_found else "no"
        model = "" if mutation.model == "gpt2" else f" ({mutation.model})"
        smallest, operation = (bisection.smallest.name, bisection.finding.operation) if bisection else ("", "")
        lines.append(f"| {mutation.breaks}{model} | {mutation.layout} | {smallest} | {result} | {operation} |")
    return "\n".join(lines)


def main() -> None:
    """Try them, and write the page if all were tried."""
    parser = ToolParser(__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTATION", help="of the table (default: all)")
    parser.add_argument("--healthy", action="store_true", help="try layouts without a fault instead")
    args = parser.parse_args()
    if args.healthy:
        for line in false_alarms():
            print(line, flush=True)
        return
    if unknown := set(args.names) - {one.name for one in MUTATIONS}:
        raise ConfigError(f"no such mutation: {', '.join(sorted(unknown))}; benchmarks/mutations/table.py lists them")
    outcomes = []
    for outcome in try_mutations([one for one in MUTATIONS if not args.names or one.name in args.names]):
        outcomes.append(outcome)
        print(outcome, flush=True)
    if not args.names:
        before, _, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{before}{MARK}\n{table(outcomes)}\n")


if __name__ == "__main__":
    run_tool(main)
