"""Bring a checkpoint into another form.

    python tools/convert_checkpoint.py to-universal checkpoints/my

A resume on another layout converts by itself; to-universal does it beforehand, on a machine without GPUs.
"""

import argparse
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _project_root  # noqa: F401

from megatron.checkpoint.tracker import RUN_FILE, newest, tag_at
from megatron.cli import ToolParser, run_tool


@dataclass(frozen=True)
class Command:
    """A sub-command: the flags it takes, and what it does with them; its docstring is its help."""

    add_flags: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], None]


def main() -> None:
    """Read the arguments, and leave the rest to the sub-command."""
    args = _parser().parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    COMMANDS[args.command].run(args)


def _to_universal(args: argparse.Namespace) -> None:
    """Write the universal form of a checkpoint beside it, as TAG_universal: every parameter whole, in its own files.

    pretrain_gpt2.py --load takes it from there for any layout; so does DeepSpeed with "load_universal".
    """
    saved = tag_at(args.path) if (args.path / RUN_FILE).exists() else newest(args.path)

    from megatron.checkpoint.conversion import cached
    from megatron.checkpoint.universal import point_to

    folder, is_new = cached(saved)
    point_to(folder)
    print(f"{folder}: {'converted from' if is_new else 'is there already, of'} {saved.folder / saved.tag}")


def _to_universal_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint folder or one tag of it")


COMMANDS = {"to-universal": Command(_to_universal_flags, _to_universal)}


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ToolParser)
    for name, command in COMMANDS.items():
        text = inspect.cleandoc(command.run.__doc__)
        command.add_flags(commands.add_parser(name, description=text, help=text.splitlines()[0].rstrip(".")))
    return parser


if __name__ == "__main__":
    run_tool(main)
