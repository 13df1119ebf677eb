"""Show what a run was trained on, from its checkpoint, its metrics and its data.

    python tools/audit_data.py batch --load checkpoints/my --iteration 700 --rank 3
    python tools/audit_data.py seen --load checkpoints/my --iteration 700
    python tools/audit_data.py proof --load checkpoints/my --metrics-file runs/my.jsonl
    python tools/audit_data.py overlap --load checkpoints/my

If the data or the vocabulary have moved, give their current paths with the flags of pretrain_gpt2.py: --data-path and
the like, --vocab-file, --merge-file. With these flags, overlap needs no checkpoint.

Exit code 0: success; 1: not proven, or splits overlap; 2: wrong usage, another vocabulary; 3: wrong data; 4: wrong
checkpoint.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import _project_root  # noqa: F401
from _atomic_file import atomic_file

from megatron.cli.flags import read_flags
from megatron.cli.provided import Provided
from megatron.common.errors import ConfigError, escaped
from megatron.common.tokenizer_files import check_tokenizer_folder, tokenizer_files, tokenizer_kind
from megatron.config import DataConfig
from megatron.config.data import read_blend
from megatron.data.splits import all_sources
from megatron.tokenizer import Tokenizer, tokenizer_of
from megatron.tools.audit import overlaps, proof, samples
from megatron.tools.audit.case import Case, check_contents, check_tokenizer, open_case
from megatron.tools.command_line import ToolParser, output_file, run_tool

CHARACTERS = 200


@dataclass(frozen=True)
class Command:
    """A sub-command."""

    run: Callable[[argparse.Namespace, Mapping[str, Any]], bool]
    """Called with the arguments and the fields of DataConfig given by other flags; False means exit code 1."""
    flags: Sequence[str]
    help: str


def main() -> None:
    """Parse the flags, and run the sub-command."""
    args, words = _parser().parse_known_args()
    if not COMMANDS[args.command].run(args, _data_flags(words)):
        sys.stdout.flush()
        sys.exit(1)


def _batch(args: argparse.Namespace, data_fields: Mapping[str, Any]) -> bool:
    if args.characters < 0:
        raise ConfigError(f"--characters {args.characters} must be 0 or more")
    batch = samples.batch_of(open_case(args.load, data_fields, override=args.override), args.iteration, args.rank)
    _print(args, batch, samples.batch_as_text(batch, args.characters))
    return True


def _seen(args: argparse.Namespace, data_fields: Mapping[str, Any]) -> bool:
    case = open_case(args.load, data_fields)
    iteration = case.saved.iteration if args.iteration is None else args.iteration
    rows: list[dict[str, Any]] = []
    with atomic_file(args.output, "--output") if args.output else nullcontext() as file:
        if file:
            file.write(f"{samples.HEADING}\n")
        for seen in samples.seen_up_to(case, iteration):
            rows.append(samples.seen_as_dict(seen))
            if file:
                file.writelines(f"{line}\n" for line in samples.seen_as_table(seen))
    _print(args, rows, samples.seen_as_text(rows, iteration))
    return True


def _proof(args: argparse.Namespace, data_fields: Mapping[str, Any]) -> bool:
    case = open_case(args.load, data_fields)
    found = proof.prove(case.history, case.saved.skipped_samples, args.metrics_file)
    _print(args, found, proof.as_text(found, case.saved.path))
    return found["proven"]


def _overlap(args: argparse.Namespace, data_fields: Mapping[str, Any]) -> bool:
    data, tokenizer = _data_and_tokenizer(args, data_fields)
    found = overlaps.find_overlaps(all_sources(data), tokenizer.eod)
    _print(args, found, overlaps.overlaps_as_text(found))
    return not overlaps.overlaps(found)


def _data_and_tokenizer(args: argparse.Namespace, data_fields: Mapping[str, Any]) -> tuple[DataConfig, Tokenizer]:
    """The data of a checkpoint, or of the flags alone, and its tokenizer."""
    if args.load:
        case: Case = open_case(args.load, data_fields, override=args.override)
        check_contents(case.data, str(case.saved.path))
        return case.data, case.tokenizer
    data = DataConfig(**data_fields)
    if not data.prefixes:
        raise ConfigError("give --load with a checkpoint, or --data-path (or --train-data-path) with the data")
    tokenizer = tokenizer_of(data)
    if not args.override:
        check_tokenizer(data, tokenizer)
    return data, tokenizer


def _data_flags(words: Sequence[str]) -> dict[str, Any]:
    """The fields of DataConfig given by flags of pretrain_gpt2.py. Raises ConfigError for other flags."""
    given, problems, _ = read_flags(words)
    if problems := problems or list(_data_problems(given)):
        raise ConfigError(problems)
    found = {name: value.value for name, value in given.items()}
    data = DataConfig(**found)
    kind = tokenizer_kind(found.get("tokenizer_type"), data.tokenizer_model)
    if kind != data.tokenizer_type:
        found["tokenizer_type"] = kind
    check_tokenizer_folder(kind, data.tokenizer_model)
    files = tokenizer_files(kind, data.vocab_file, data.merge_file, data.tokenizer_model)
    return found | {name: file for name, file in zip(("vocab_file", "merge_file"), files, strict=True) if file}


def _data_problems(given: Mapping[str, Provided]) -> Iterator[str]:
    names = {field.name for field in fields(DataConfig)}
    for name, (value, source) in given.items():
        if name not in names:
            yield f"{source} is not about data (see --help)"
        elif name.endswith("data_path"):
            try:
                read_blend(tuple(value))
            except ValueError as error:
                yield f"{source}: {error}"


def _print(args: argparse.Namespace, found: Any, lines: Iterable[str]) -> None:
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for line in lines:
            print(escaped(line, "\n\t"))


def _parser() -> ToolParser:
    parser = ToolParser(__doc__)
    parser.usage = "%(prog)s COMMAND [--load CHECKPOINT] [flags] [flags of pretrain_gpt2.py about data]"
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=ToolParser)
    for name, command in COMMANDS.items():
        prog = f"{parser.prog} {name}"
        sub = commands.add_parser(name, prog=prog, description=command.help, help=command.help)
        sub.add_argument("--json", action="store_true", help="print JSON")
        for flag in command.flags:
            options = _FLAGS[flag.removesuffix("!")]
            sub.add_argument(flag.removesuffix("!"), **(options | {"required": True} if "!" in flag else options))
    return parser


_FLAGS: dict[str, dict[str, Any]] = {
    "--load": {"type": Path, "metavar": "CHECKPOINT", "help": "a folder of checkpoints, or one of them"},
    "--iteration": {"type": int, "metavar": "N", "help": "iteration, from 1"},
    "--rank": {"type": int, "metavar": "R", "help": "only the samples of this rank (default: all ranks)"},
    "--characters": {
        "type": int,
        "default": CHARACTERS,
        "metavar": "N",
        "help": "characters per text; 0: all",
    },
    "--metrics-file": {"type": Path, "metavar": "FILE", "help": "the file that --metrics-file of the run wrote"},
    "--override": {"action": "store_true", "help": "another tokenizer may have made the data"},
    "--output": {"type": output_file, "metavar": "FILE", "help": "file to write"},
}
COMMANDS = {
    "batch": Command(
        _batch,
        ("--load!", "--iteration!", "--rank", "--characters", "--override"),
        "the documents and the text in a global batch",
    ),
    "seen": Command(
        _seen, ("--load!", "--iteration", "--output"), "how often each document was seen; --output lists all of them"
    ),
    "proof": Command(
        _proof, ("--load!", "--metrics-file"), "prove that each sample was used once, through all restarts and layouts"
    ),
    "overlap": Command(
        _overlap, ("--load", "--override"), "documents in more than one of training, validation and test"
    ),
}


if __name__ == "__main__":
    run_tool(main)
