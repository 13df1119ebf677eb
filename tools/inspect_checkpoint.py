"""Show what a checkpoint is, whether it is undamaged, and its parameters; or how two checkpoints differ.

    python tools/inspect_checkpoint.py checkpoints/my
    python tools/inspect_checkpoint.py --diff checkpoints/my checkpoints/other

A path is a folder of checkpoints, one tag of it, a universal checkpoint, merged weights, or a Hugging Face folder.
Two are compared tensor by tensor under the names without a pipeline, regardless of their layouts: max |b - a|, and the
same relative to max |a|.

Exit code 0: undamaged, or equal; 1: they differ; 2: wrong usage; 4: damaged.
"""

import argparse
import os
import sys
from pathlib import Path

import _project_root  # noqa: F401

from megatron.common.errors import ConfigError
from megatron.tools.command_line import ToolParser, check_values, print_warnings, read_architecture, run_tool
from megatron.tools.convert.inspection import FoundCheckpoint, find, integrity


def main() -> None:
    """Recognize the paths, and only then import torch."""
    args = _parser().parse_args()
    if (args.path is None) == (args.diff is None):
        raise ConfigError("give one PATH, or --diff with two (see --help)")
    check_values(args, {"tolerance": "[0, inf)"})
    if args.program:
        read_architecture(args.program)
    found = [find(path) for path in args.diff or [args.path]]
    print_warnings(line for one in found if one.saved for line in one.saved.warnings)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if args.diff:
        _compare(found, args)
    else:
        _inspect(found[0], args)


def _inspect(found: FoundCheckpoint, args: argparse.Namespace) -> None:
    whole = integrity(found)

    from megatron.tools.convert.load_and_save import check_optimizer, read_versions, read_weights
    from megatron.tools.convert.report import describe_checkpoint, heading, listing, parameters, parameters_as_json

    known = describe_checkpoint(found) | {"versions": read_versions(found), "whole": whole}
    if not args.json:
        print(heading(known) + "\n", flush=True)
    check_optimizer(found)
    listed = parameters(read_weights(found))
    print(parameters_as_json(known, listed) if args.json else listing(listed))


def _compare(found: list[FoundCheckpoint], args: argparse.Namespace) -> None:
    for each in found:
        integrity(each)

    from megatron.tools.convert.load_and_save import read_weights
    from megatron.tools.convert.report import are_equal, differences, differences_as_json, differences_as_text

    first, second = map(read_weights, found)
    result = differences(first, second)
    print((differences_as_json if args.json else differences_as_text)(result, args.tolerance), flush=True)
    if not are_equal(result, args.tolerance):
        sys.exit(1)


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.add_argument("path", nargs="?", type=Path, metavar="PATH", help="the checkpoint")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compare two")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="T", help="largest relative difference that counts as equal"
    )
    parser.add_argument("--program", type=Path, metavar="FILE", help="entry script, of a model of your own")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    run_tool(main)
