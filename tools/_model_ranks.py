"""What the evaluation tools share: model flags, loading the model on its ranks, writing the result."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _atomic_file import atomic_file, check_unread

from megatron.common.environment import world_size
from megatron.common.errors import ConfigError, counted
from megatron.common.screen import check_output
from megatron.config import ParallelConfig
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.tools.command_line import ToolParser, check_values, output_file
from megatron.tools.inference.model_flags import add_model_flags, context_length, source_of
from megatron.tools.inference.source import Source, config_on

if TYPE_CHECKING:
    from megatron.tools.evaluation.scoring import ForwardModel

_INTERVALS = {
    "model_parallel_size": "[1, inf)",
    "pipe_parallel_size": "[0, inf)",
    "batch_size": "[1, inf)",
    "seq_length": "[1, inf)",
}


def add_rank_flags(parser: ToolParser) -> None:
    """Add the flags for the model, its parallelism and the batch size."""
    add_model_flags(parser, shared_by="1; other processes share the samples")
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--pipe-parallel-size",
        "--pipeline-model-parallel-size",
        type=int,
        default=0,
        metavar="N",
        help="pipeline stages, for a model too large otherwise; 0 is none",
    )
    group.add_argument(
        "--batch-size", "--micro-batch-size", type=int, default=8, metavar="N", help="samples that are scored together"
    )
    # Scripts for Megatron-LM's tasks pass these; here they have no effect.
    for flag in ("--checkpoint-activations", "--no-load-optim", "--no-load-rng"):
        group.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    for flag in ("--log-interval", "--checkpoint-num-layers", "--activations-checkpoint-method"):
        group.add_argument(flag, help=argparse.SUPPRESS)
    group.add_argument("--json", type=output_file, metavar="FILE", help="file to write the result to, too")
    group.add_argument("--seq-length", type=int, metavar="N", help="context length in tokens (default: the model's)")


def find_model(args: argparse.Namespace, accepted: Sequence[ArchitectureSpec] = (GPT2,)) -> tuple[Source, int]:
    """The model that ``args`` name, and the context length. Reads no weights, and imports no torch.

    Raises ConfigError if ``args`` are invalid, or the number of processes cannot share the model, and as ``source_of``.
    """
    check_values(args, _INTERVALS)
    source = source_of(args, os.environ, accepted)
    seq_length = context_length(args, source)
    layers = source.config.num_layers
    if args.pipe_parallel_size > layers:
        raise ConfigError(
            f"--pipe-parallel-size {args.pipe_parallel_size} is more than the {layers} layers of {source.name}"
        )
    if args.pipe_parallel_size and (source.config.encoder_num_layers or source.config.vision_num_layers):
        raise ConfigError(
            f"--pipe-parallel-size {args.pipe_parallel_size}: {source.name} has an encoder, and is evaluated without "
            "stages: remove it"
        )
    tensor, stages, started = args.model_parallel_size or 1, max(args.pipe_parallel_size, 1), world_size(os.environ)
    if started % (tensor * stages):
        raise ConfigError(
            f"{counted(started, 'process')} cannot be split into --model-parallel-size {tensor} x "
            f"--pipe-parallel-size {stages}: start as many with deepspeed --num_gpus {tensor * stages}"
        )
    config_on(source.config, tensor, args.dtype)  # raises here, before all ranks would
    _check_outputs(args)
    return source, seq_length


@contextmanager
def opened(source: Source, args: argparse.Namespace) -> Iterator["ForwardModel"]:
    """The model on the ranks of this run, whose process group ends with the block. Needs a prepared environment.

    Raises CheckpointError if its weights are incomplete.
    """
    from megatron.tools.evaluation.scoring import open_forward
    from megatron.tools.inference import model

    parallel = ParallelConfig(
        model_parallel_size=args.model_parallel_size or 1,
        pipe_parallel_size=args.pipe_parallel_size,
        world_size=world_size(os.environ),
    )
    load = partial(open_forward, source, dtype=args.dtype, pipeline=parallel.uses_pipeline)
    with model.opened(parallel, load) as opened_model:
        _check_outputs(args)  # the weights have been read
        yield opened_model


def _check_outputs(args: argparse.Namespace) -> None:
    """Raises ConfigError, before the evaluation, if an output is a file that has been read."""
    for name in ("json", "predictions"):
        if path := getattr(args, name, None):
            check_unread(path, f"--{name}")


def write_result(result: Mapping[str, Any], file: Path | None) -> None:
    """Write a result as JSON to ``file``, if one is given, and print it. Raises as ``atomic_file``."""
    text = json.dumps(result, indent=2, default=str)  # lm-eval returns functions
    if file:
        with atomic_file(file, "--json") as out:
            out.write(text + "\n")
    print(text, flush=True)
    if not file:
        check_output()
