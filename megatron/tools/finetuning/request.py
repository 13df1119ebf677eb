"""Command line of tasks/main.py: flags of a task, and the configuration of its training run. No torch here."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.tracker import holds_checkpoint, newest
from megatron.cli import parse_run, read_run
from megatron.cli.flags import read_flags
from megatron.cli.provided import Provided
from megatron.common.errors import CheckpointError, ConfigError, DataError, counted
from megatron.config import RunConfig, flag_fields
from megatron.config.fields import flag_name
from megatron.model.architectures import BERT, CLASSIFIER
from megatron.tools.command_line import ToolParser
from megatron.tools.finetuning.tables import GLUE, Format, Table, content_hash, labels_of, read_table

TSV = "TSV"
"""The task that reads any tab-separated file, with columns given by flags."""
EVALUATION_TASKS = ("LAMBADA", "WIKITEXT", "WIKITEXT103", "PPL")
"""Tasks without training, which run tools/evaluate.py."""

_MODEL_FIELDS = (
    "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings",
    "layernorm_epsilon", "openai_gelu", "apply_residual_connection_post_layernorm",
)  # fmt: skip
_DATA_FIELDS = ("seq_length", "tokenizer_type", "vocab_file")


@dataclass(frozen=True)
class TaskRun:
    """A task and the configuration of its training run."""

    name: str
    training: tuple[Table, ...]
    validation: tuple[Table, ...]
    iterations_per_epoch: int
    epochs: float
    """0 only evaluates."""
    run: RunConfig
    pretrained: str | None
    """Folder of the pretrained BERT checkpoint to start from; None for random weights."""
    warnings: tuple[str, ...]
    """Warnings about given settings that have no effect."""

    def pretraining(self, run: RunConfig) -> RunConfig:
        """``run`` changed to the BERT architecture, loading ``pretrained``, as an argument of ``select_checkpoint``."""
        checkpoint = replace(run.checkpoint, load=self.pretrained, save=None, auto_resume=False, finetune=True)
        return replace(run, checkpoint=checkpoint, model=replace(run.model, architecture=BERT.name, classes=()))


def build_parser(description: str) -> ToolParser:
    """The parser of the flags of a task. All other flags are flags of training programs."""
    parser = ToolParser(description)
    parser.usage = "%(prog)s --task NAME --train-data FILE ... --valid-data FILE ... --epochs N [flags of training]"
    add = parser.add_argument
    names = f"{', '.join(GLUE)}; {TSV}: any table; {', '.join(EVALUATION_TASKS)}: tools/evaluate.py"
    add("--task", type=str.upper, required=True, metavar="NAME", help=names)
    add("--epochs", type=int, metavar="N", help="epochs of training; 0 evaluates only, with --load")
    add("--pretrained-checkpoint", metavar="DIR", help="checkpoint of BERT to start from, of any layout")
    add("--keep-last", action="store_true", help="also train on the rows left over at the end of an epoch")
    add("--train-data", nargs="+", type=Path, default=[], metavar="FILE", help="tables to train on")
    add("--valid-data", nargs="*", type=Path, default=[], metavar="FILE", help="tables to measure the accuracy on")
    table = parser.add_argument_group(f"tables of --task {TSV}")
    table.add_argument(
        "--text-columns",
        nargs="+",
        metavar="COLUMN",
        help="column of the text, or two of a pair: names in the header, or numbers from 1 (default: 1)",
    )
    table.add_argument("--label-column", metavar="COLUMN", help="column of the label (default: label)")
    table.add_argument(
        "--labels", nargs="+", metavar="LABEL", help="all labels (default: the labels in --train-data, sorted)"
    )
    table.add_argument("--no-header", action="store_true", help="the first line is a row")
    return parser


def read_task(args: argparse.Namespace, flags: Sequence[str], environ: Mapping[str, str]) -> TaskRun:
    """The task and its run, from the parsed ``args`` of ``build_parser`` and the remaining ``flags`` of training.

    Model sizes and tokenizer default to those of the checkpoint to load.

    Raises:
        ConfigError: with a line for each flag that is invalid, missing or contradicts another.
        DataError: a table is invalid; the message names file and line.
        CheckpointError: the checkpoint is missing or broken.
    """
    form = _format(args)
    saved, flags = _with_checkpoint(args, flags)
    given, _, _ = read_flags(flags, CLASSIFIER)
    _check_length(args, given)
    if args.epochs == 0:  # load only weights
        flags += ["--finetune", *([] if "lr" in given else ["--lr", "1"])]
    first = parse_run([*flags, *_iterations(given, 1)], environ, CLASSIFIER)  # for its batch size
    paths = (args.train_data if args.epochs != 0 else []), args.valid_data
    training, validation = (tuple(read_table(path, form) for path in each) for each in paths)
    classes = form.labels or (tuple(saved.model["classes"]) if saved else ()) or labels_of(training)
    if len(classes) < 2:
        raise DataError(f"{args.train_data[0]}: all rows have the label {classes[0]}; a classifier needs two at least")
    for table in (*training, *validation):
        table.check_labels(classes)
    per_epoch = _iterations_per_epoch(training, first.train.global_batch_size, args.keep_last)
    parsed = read_run([*flags, *_iterations(given, max((args.epochs or 0) * per_epoch, 1))], environ, CLASSIFIER)
    run = parsed.checked()
    epochs = run.train.train_iters / per_epoch if args.epochs is None else args.epochs
    model = replace(run.model, classes=classes)
    data = replace(run.data, data_hash=content_hash(table.path for table in training))
    run = replace(run, model=model, data=data)
    warnings = tuple(parsed.warnings)
    return TaskRun(args.task, training, validation, per_epoch, epochs, run, args.pretrained_checkpoint, warnings)


def _format(args: argparse.Namespace) -> Format:
    """The format of the task's tables."""
    flags = {
        "--text-columns": args.text_columns,
        "--label-column": args.label_column,
        "--labels": args.labels,
        "--no-header": args.no_header,
    }
    if args.task != TSV:
        if args.task not in GLUE:
            raise ConfigError(
                f"--task {args.task} is unknown: choose from {', '.join((*GLUE, TSV, *EVALUATION_TASKS))}"
            )
        if given := [flag for flag, value in flags.items() if value]:
            raise ConfigError(f"{given[0]} is for --task {TSV}: the columns of {args.task} are known")
        return GLUE[args.task]
    texts = tuple(args.text_columns or ["1"])
    if len(texts) > 2:
        raise ConfigError(f"--text-columns {' '.join(texts)}: give one column, or two for pairs of texts")
    if args.no_header and args.label_column is None:
        raise ConfigError("--no-header needs --label-column: the number of the column with the labels, counted from 1")
    labels = tuple(args.labels or ())
    if len(set(labels)) < len(labels) or len(labels) == 1:
        raise ConfigError(f"--labels {' '.join(labels)}: give two different labels at least, each once")
    return Format(texts, args.label_column or "label", labels, has_header=not args.no_header)


def _with_checkpoint(args: argparse.Namespace, flags: Sequence[str]) -> tuple[SavedRun | None, list[str]]:
    """The checkpoint to load, if any, and ``flags`` completed with its model sizes and tokenizer."""
    given, problems, _ = read_flags(flags, CLASSIFIER)
    if problems:
        raise ConfigError(problems)
    load, pretrained = given["load"].value if "load" in given else None, args.pretrained_checkpoint
    saved = newest(load) if load is not None and holds_checkpoint(Path(load)) else None
    if saved is None and pretrained is not None:
        if not holds_checkpoint(Path(pretrained)):
            problem = "no checkpoint there; name a folder that contains one"
            raise CheckpointError(f"--pretrained-checkpoint {pretrained}: {problem}")
        saved = newest(pretrained)
        if (architecture := saved.model["architecture"]) != BERT.name:
            problem = f"is a {architecture} model: name one of {BERT.program}"
            raise CheckpointError(f"--pretrained-checkpoint {pretrained} {problem}")
    if saved is None:
        return None, list(flags)
    values: dict[str, Any] = {name: saved.model.get(name) for name in _MODEL_FIELDS}
    values |= {name: saved.config["data"].get(name) for name in _DATA_FIELDS}
    completed = list(flags)
    for name, value in values.items():
        if name not in given and value and not (name == "vocab_file" and "tokenizer_model" in given):
            flag = flag_name(flag_fields()[name])
            completed += [flag] if value is True else [flag, str(value)]
    return saved, completed


def _check_length(args: argparse.Namespace, given: Mapping[str, Provided]) -> None:
    """Check that the length of training is given exactly once, and that the required tables are given."""
    length = next((given[name].source for name in ("train_iters", "train_samples") if name in given), None)
    epochs = args.epochs
    rules = (
        (epochs is None and length is None, "--epochs is required (or --train-iters)"),
        (None not in (epochs, length), f"--epochs {epochs} and {length} exclude each other: give one"),
        (epochs is not None and epochs < 0, f"--epochs {epochs} must be 0 or more"),
        (epochs != 0 and not args.train_data, "--train-data is required (or --epochs 0, which only evaluates)"),
        (
            epochs == 0 and not args.valid_data,
            "--valid-data is required with --epochs 0: there is nothing else to do",
        ),
        (
            epochs == 0 and "load" not in given,
            "--epochs 0 needs --load: a checkpoint of a model that this program has fine-tuned",
        ),
    )
    if problems := [message for is_broken, message in rules if is_broken]:
        raise ConfigError(problems)


def _iterations(given: Mapping[str, Provided], iterations: int) -> list[str]:
    """``--train-iters iterations``, unless the length of the run is given."""
    return [] if {"train_iters", "train_samples"} & given.keys() else ["--train-iters", str(iterations)]


def _iterations_per_epoch(training: Sequence[Table], global_batch_size: int, keep_last: bool) -> int:
    rows = sum(len(table.rows) for table in training)
    if not training:
        return 1
    if rows < global_batch_size and not keep_last:
        raise DataError(
            f"{training[0].path}: {counted(rows, 'row')}, fewer than a global batch of {global_batch_size}: lower "
            "--global-batch-size, or add --keep-last"
        )
    return -(-rows // global_batch_size) if keep_last else rows // global_batch_size
