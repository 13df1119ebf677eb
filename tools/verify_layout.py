"""Train the same model on several layouts and check that they compute the same.

    python tools/verify_layout.py --layouts tp1-pp0-dp1 tp2-pp2-dp2-zero1 ARGUMENTS OF pretrain_gpt2.py
    python tools/verify_layout.py --all 4 ARGUMENTS OF pretrain_gpt2.py
    python tools/verify_layout.py --all 8 --sample 10 ARGUMENTS OF pretrain_gpt2.py
    python tools/verify_layout.py --program pretrain_bert.py --all 2 ARGUMENTS OF pretrain_bert.py

Each layout is trained from the same seed on the same samples, without dropout, and compared with the first one: the
losses and gradient norms of all iterations, the gradient of each parameter in the first step, and the final weights. A
layout is named tpA-ppB-dpC[-epE][-zeroZ][-sp][-cpN][-ulyssesN][-interleavedV|-zbh1|-zbv|-dualpipev][-plain]: tensor
parallel A, B pipeline stages (0, or 1 with plain, is DeepSpeedEngine, without a pipeline), data parallel C, experts
divided over E of these ranks, ZeRO stage Z, Megatron's sequence parallelism, context parallelism over N ranks,
DeepSpeed-Ulysses over N ranks, a pipeline schedule, the interleaved one with V model chunks per stage. All have the
global batch of the first and the same micro-batch size.

Losses and gradient norms are compared by |b - a| / |a|, the largest of all iterations; gradients by the largest
element of |b - a| over the largest of |a|, the largest of all parameters; weights by |b - a| over the sum of the
learning rates, apart for elements whose first gradient is far above rounding (weights) and for all others, which Adam
may move anywhere within that sum (other weights). docs/verify.md explains the bounds.

Of a layout that differs, the smallest one that still does is looked for, with some of its axes and options, and the
first tensor there that differs from one process: the output of a module, a gradient, or what the step makes of them.

Exit code 0: all agree; 1: one differs or failed; 2: wrong usage.
"""

import os
import sys
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import check_not_read, write_json

from megatron.common.environment import expected_device
from megatron.common.errors import ConfigError
from megatron.tools.command_line import ToolParser, check_values, output_file, run_tool
from megatron.tools.planning.explain import explain
from megatron.tools.verify.request import PROGRAM, make_request, parse_layout, rule_violations, supported_layouts


def main() -> None:
    """Check what is to be run before torch is imported; then run, compare, report."""
    args, words = _parser().parse_known_args()
    if (args.layouts is None) == (args.all is None):
        raise ConfigError("give --layouts with names, or --all with a number of processes (see --help)")
    intervals = {"iterations": "[1, inf)", "all": "[1, 256]", "sample": "[1, 1e6]"}
    check_values(args, {**intervals, "tolerance": "[0, inf)", "time_limit": "(0, 604800]"})
    if args.sample is not None and args.all is None:
        raise ConfigError(f"--sample {args.sample} chooses among the layouts of --all N: give --all, too")
    named = [parse_layout(name) for name in args.layouts or ()]
    request = make_request(words, args.iterations, named[0] if named else None, os.environ, args.program)
    layouts = named or supported_layouts(request, args.all, args.sample, args.sample_seed)
    if args.explain:
        for layout in layouts:
            print(f"\n{layout.name}")
            explain(request.parsed(layout))
        return
    if problems := rule_violations(request, named):
        raise ConfigError(problems)
    if args.list:
        print("\n".join(layout.name for layout in layouts))
        return

    os.environ.setdefault("DS_ACCELERATOR", expected_device(os.environ))  # otherwise DeepSpeed looks, and logs that
    from megatron.tools.verify.bisect import Bisector, bisections
    from megatron.tools.verify.compare import Bounds
    from megatron.tools.verify.results import as_dict, progress_line, table, verify_layouts

    reference = request.run(layouts[0])
    check_not_read(args.json, "--json", reference)
    bounds = Bounds.of(reference.precision.dtype)
    if args.tolerance is not None:
        bounds = bounds._replace(loss=args.tolerance, grad_norm=args.tolerance, gradient=args.tolerance)
    results = []
    for result in verify_layouts(request, layouts, bounds, args.time_limit):
        results.append(result)
        print(progress_line(len(results), len(layouts), result), flush=True)
    print(
        f"\nLargest differences from {layouts[0].name} in {args.iterations} iterations:\n\n{table(results, bounds)}\n"
    )
    found, bisector = [], Bisector(request, bounds, args.time_limit)
    if not args.no_bisect:
        for bisection in bisections(bisector, results):
            found.append(bisection)
            print(f"{bisection}\n", flush=True)
    write_json(args.json, as_dict(results, found, bounds=bounds, iterations=args.iterations))
    agreeing = sum(result.agrees or result.layout in bisector.rounded for result in results)
    print(f"{agreeing} of {len(layouts)} layouts agree within these bounds", flush=True)
    if agreeing < len(layouts):
        sys.exit(1)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s (--layouts NAME ... | --all N) [flags] ARGUMENTS OF THE PROGRAM"
    add = parser.add_argument
    add("--layouts", nargs="+", metavar="NAME", help="layouts; the others are compared with the first")
    add("--all", type=int, metavar="N", help="one process, then every layout of N processes that breaks no rule")
    add("--sample", type=int, metavar="M", help="of the layouts of --all, M that --sample-seed chooses")
    add("--sample-seed", type=int, default=1, metavar="S", help="another seed chooses other layouts")
    add("--program", type=Path, default=PROGRAM, metavar="FILE", help="entry script that trains the model")
    add("--iterations", type=int, default=10, metavar="K", help="iterations of each run")
    add(
        "--tolerance",
        type=float,
        metavar="T",
        help="largest relative difference of losses, gradient norms and gradients (default: 1e-4 in fp32; "
        "docs/verify.md has those of half precision)",
    )
    add("--json", type=output_file, metavar="FILE", help="write the results to this file too")
    add("--no-bisect", action="store_true", help="do not look for what is wrong in layouts that differ")
    add("--list", action="store_true", help="print the layouts, and run nothing")
    add("--explain", action="store_true", help="explain each layout, rule by rule, and run nothing")
    add("--time-limit", type=float, default=1800, metavar="S", help="seconds that a run may take")
    return parser


if __name__ == "__main__":
    run_tool(main)
