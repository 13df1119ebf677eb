"""Check, without a GPU and without the other ranks, that no rank of a run can wait for another forever.

    python tools/verify_communication.py --world-size 1024 ARGUMENTS OF pretrain_gpt2.py
    python tools/verify_communication.py --program pretrain_t5.py --world-size 8 ARGUMENTS OF pretrain_t5.py
    python tools/verify_communication.py --all 4 ARGUMENTS OF pretrain_gpt2.py

Each rank runs alone, the unmodified program with all of its settings, on a device without memory: it has the shapes of
all tensors, and computes nothing. What it sends, receives, reduces and waits for is recorded, with the line of code: in
a fresh start with training, an evaluation and checkpoints, and in one that resumes, saves in the background and in
memory, and ends by a signal. Of more than 4 ranks, those are run that stand for all others of their stage, and
--sample others, which are compared with them. With --all, every layout that breaks no rule is run, each with one other
rank, and loads the checkpoint of another layout.

Then all ranks are checked together by NCCL's rules: all ranks of a group call the same operations in the same order,
sends and receives meet, no ranks wait for one another in a circle, no two ranks use two groups in opposite orders, and
nothing uses a buffer before the operation on it was waited for. docs/communication.md says what this proves.

Exit code 0: no rank can hang; 6: one can, and why is printed; 2: wrong usage.
"""

import os
import tempfile
from argparse import Namespace
from pathlib import Path

import _project_root  # noqa: F401
from _atomic_file import check_not_read, write_json

from megatron.common.errors import ConfigError, LaunchError
from megatron.tools.command_line import ToolParser, check_values, output_file, run_tool
from megatron.tools.communication.request import ITERATIONS, make_starts
from megatron.tools.verify.request import make_request, supported_layouts

PROGRAM = Path(__file__).resolve().parents[1] / "pretrain_gpt2.py"
MOST = 8
"""Ranks of which every layout can be run."""


def main() -> None:
    """Check the arguments before torch is imported; then extract, check, report."""
    args, words = _parser().parse_known_args()
    check_values(
        args, {"world_size": "[1, 1e6]", "all": f"[1, {MOST}]", "sample": "[0, 1e6]", "processes": "[1, 1024]"}
    )
    if (args.world_size is None) == (args.all is None):
        raise ConfigError("give --world-size, or --all for every layout of a number of ranks (see --help)")
    os.environ.update(DS_ACCELERATOR="cuda", OMP_NUM_THREADS="1")
    if args.all is not None:
        verify_every_layout(args, words)
    else:
        verify_one_layout(args, words)


def verify_one_layout(args: Namespace, words: list[str]) -> None:
    """Of the layout of the command line: all findings by start and phase."""
    run, starts = make_starts(words, args.world_size, os.environ, args.program)
    check_not_read(args.json, "--json", run)

    from megatron.tools.communication.verify import as_dict, table, verify

    findings = []
    with tempfile.TemporaryDirectory(prefix="verify_communication.", ignore_cleanup_errors=True) as folder:
        sample = 2 if args.sample is None else args.sample
        settings = {"processes": args.processes, "sample": sample, "seed": args.sample_seed}
        for finding in verify(run, starts, args.program.resolve(), Path(folder), **settings):
            findings.append(finding)
            print(f"> {finding.start}: {len(finding.problems) or 'no'} problems", flush=True)
    print(f"\n{table(findings)}\n")
    write_json(args.json, as_dict(findings))
    if problems := [f"{finding.start}: {text}" for finding in findings for text in finding.problems]:
        raise LaunchError(line for problem in problems for line in problem.splitlines())
    print(f"no rank of {args.world_size} can hang", flush=True)


def verify_every_layout(args: Namespace, words: list[str]) -> None:
    """Of each layout of a number of ranks, a line, and what is wrong."""
    request = make_request(words, 2 * ITERATIONS, None, os.environ, args.program)
    layouts = supported_layouts(request, args.all, 10**6 if args.sample is None else args.sample, args.sample_seed)
    check_not_read(args.json, "--json", request.run(layouts[0]))

    from megatron.tools.communication.verify import as_dict, verify_layouts

    found, problems = {}, []
    with tempfile.TemporaryDirectory(prefix="verify_communication.", ignore_cleanup_errors=True) as folder:
        for layout, findings in verify_layouts(request, layouts, Path(folder), args.processes):
            found[layout.name] = as_dict(findings)
            own = [f"{layout.name}, {finding.start}: {text}" for finding in findings for text in finding.problems]
            print(f"> {len(found)}/{len(layouts)} {layout.name}: {len(own) or 'no'} problems", flush=True)
            problems += own
    write_json(args.json, found)
    if problems:
        raise LaunchError(line for problem in problems for line in problem.splitlines())
    print(f"no rank of these {len(found)} layouts can hang", flush=True)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s (--world-size N | --all N) [flags] ARGUMENTS OF THE PROGRAM"
    add = parser.add_argument
    add("--world-size", type=int, metavar="N", help="ranks of the run")
    add("--all", type=int, metavar="N", help=f"one rank, then every layout of N ranks, at most {MOST}")
    add("--program", type=Path, default=PROGRAM, metavar="FILE", help="entry script that trains the model")
    ranks = "ranks that are run besides those that stand for all (default: 2); with --all: layouts (default: all)"
    add("--sample", type=int, metavar="M", help=ranks)
    add("--sample-seed", type=int, default=1, metavar="S", help="another seed chooses other ranks, or layouts")
    cores = len(os.sched_getaffinity(0))
    add("--processes", type=int, default=cores, metavar="P", help="ranks that are run at a time")
    add("--json", type=output_file, metavar="FILE", help="write the results to this file too")
    return parser


if __name__ == "__main__":
    run_tool(main)
