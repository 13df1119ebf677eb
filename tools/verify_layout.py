"""Train the same model on several layouts and see that they compute the same.

    python tools/verify_layout.py --layouts tp1-pp0-dp1 tp2-pp2-dp2-zero1 ARGUMENTS OF pretrain_gpt2.py
    python tools/verify_layout.py --all 4 ARGUMENTS OF pretrain_gpt2.py

Each layout is a run of pretrain_gpt2.py from the same seed on the same samples, without dropout. Its losses,
gradient norms and final weights are compared with those of the first layout. A layout is named
tpA-ppB-dpC[-zeroZ][-sp][-ulyssesN][-dualpipev][-plain]: tensor parallel A, B pipeline stages (0, or 1 with plain, is
the plain engine), data parallel C, ZeRO stage Z, Megatron's sequence parallelism, DeepSpeed's over N ranks, DeepSpeed's
DualPipeV schedule. All take the global batch of the first, with the micro-batch that is given; gradient accumulation
follows.

A difference is relative: of losses and gradient norms the largest of all iterations, |b - a| / |a|; of weights the
largest of all tensors, max |b - a| / max |a|, with every copy of a tensor that several ranks hold. The bias of
attention's keys is left out: it has no effect on anything, so its gradient is nothing but rounding.

Exit code 0: all agree; 1: one differs, or failed; 2: wrong usage.
"""

import os
import sys
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.config.errors import ConfigError
from megatron.tools.command_line import ToolParser, run_tool
from megatron.tools.planning.explain import explain
from megatron.tools.verify.request import illegal, legal_layouts, make_request, parse_layout


def main() -> None:
    """Settle what is to be run before torch comes in; then run, compare, report."""
    args, words = _parser().parse_known_args()
    if (args.layouts is None) == (args.all is None):
        raise ConfigError("give --layouts with names, or --all with a number of processes (see --help)")
    if args.iterations < 1 or (args.all is not None and args.all < 1):
        raise ConfigError("--iterations and --all take whole numbers from 1 on")
    named = [parse_layout(name) for name in args.layouts or ()]
    request = make_request(words, args.iterations, named[0] if named else None, os.environ)
    layouts = named or legal_layouts(request, args.all)
    if args.explain:
        for layout in layouts:
            print(f"\n{layout.name}")
            explain(request.reading(layout))
        return
    if problems := illegal(request, named):
        raise ConfigError(problems)
    if args.list:
        print("\n".join(layout.name for layout in layouts))
        return

    from megatron.tools.verify.comparing import Tolerances
    from megatron.tools.verify.loop import as_json, progress, table, verdicts

    tolerances = Tolerances.of(request.run(layouts[0]).precision.dtype)
    if args.tolerance is not None:
        tolerances = Tolerances(*[args.tolerance] * 3)
    found = []
    for verdict in verdicts(request, layouts, tolerances, args.time_limit):
        found.append(verdict)
        print(progress(len(found), len(layouts), verdict), flush=True)
    print(f"\nlargest differences from {layouts[0].name} over {args.iterations} iterations\n\n{table(found)}\n")
    if args.json:
        with atomic_file(args.json, "--json") as file:
            file.write(as_json(found, tolerances=tolerances, iterations=args.iterations) + "\n")
    agreeing = sum(verdict.agrees for verdict in found)
    bounds = ", ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in tolerances._asdict().items())
    print(f"{agreeing} of {len(layouts)} layouts agree within {bounds}", flush=True)
    if agreeing < len(layouts):
        sys.exit(1)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s (--layouts NAME ... | --all N) [flags] ARGUMENTS OF pretrain_gpt2.py"
    parser.add_argument(
        "--layouts", nargs="+", metavar="NAME", help="layouts; the first is what the others are held to"
    )
    parser.add_argument(
        "--all", type=int, metavar="N", help="one process, then every layout of N processes that no rule is against"
    )
    parser.add_argument("--iterations", type=int, default=10, metavar="K", help="iterations of each run")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="largest relative difference that counts as equal (default: 1e-4 in fp32; in half precision "
        "1e-3 of losses, 1e-2 of gradient norms, and any of weights)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--list", action="store_true", help="print the layouts, and run nothing")
    parser.add_argument("--explain", action="store_true", help="explain each layout, rule by rule, and run nothing")
    parser.add_argument("--time-limit", type=float, default=1800, metavar="S", help="seconds that a run may take")
    return parser


if __name__ == "__main__":
    run_tool(main)
