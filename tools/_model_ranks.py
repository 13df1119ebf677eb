"""What tools share that try a model on many samples: the flags, and the ranks that hold it."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _atomic_file import atomic_file

from megatron.config import ParallelConfig
from megatron.config.environment import world_size
from megatron.config.errors import ConfigError
from megatron.tools.command_line import ToolParser
from megatron.tools.inference.command_line import add_model_flags, check_values, source_of
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
    """The model, how it lies on the processes, and how many samples go through it together."""
    add_model_flags(parser, shared_by="1; the others share the samples")
    group = parser.add_argument_group("samples")
    group.add_argument(
        "--pipe-parallel-size",
        "--pipeline-model-parallel-size",
        type=int,
        default=0,
        metavar="N",
        help="pipeline stages, for a model that fits no other way; 0 is none",
    )
    group.add_argument(
        "--batch-size", "--micro-batch-size", type=int, default=8, metavar="N", help="samples that are scored together"
    )
    # Scripts for Megatron's tasks say these; here they change nothing.
    for flag in ("--checkpoint-activations", "--no-load-optim", "--no-load-rng"):
        group.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--log-interval", help=argparse.SUPPRESS)
    group.add_argument("--json", type=Path, metavar="FILE", help="where to write the result, too")
    group.add_argument("--seq-length", type=int, metavar="N", help="tokens that the model sees (default: all it can)")


def find_model(args: argparse.Namespace) -> tuple[Source, int]:
    """The model that ``args`` name, and how many tokens it may see. Reads no weights, and brings in no torch.

    Raises ConfigError where ``args`` are wrong, or so many processes cannot share the model, and as ``source_of``.
    """
    check_values(args, _INTERVALS)
    source = source_of(args, os.environ)
    positions = source.config.max_position_embeddings
    if args.seq_length and args.seq_length > positions:
        raise ConfigError(f"--seq-length {args.seq_length} is more than the {positions} positions of {source.name}")
    layers = source.config.num_layers
    if args.pipe_parallel_size > layers:
        raise ConfigError(
            f"--pipe-parallel-size {args.pipe_parallel_size} is more than the {layers} layers of {source.name}"
        )
    tensor, stages, started = args.model_parallel_size or 1, max(args.pipe_parallel_size, 1), world_size(os.environ)
    if started % (tensor * stages):
        raise ConfigError(
            f"{started} processes are no multiple of --model-parallel-size {tensor} x --pipe-parallel-size {stages}: "
            f"start as many with deepspeed --num_gpus {tensor * stages}"
        )
    config_on(source.config, tensor, args.dtype)  # refuses while one rank can still speak for all
    return source, args.seq_length or positions


@contextmanager
def opened(source: Source, args: argparse.Namespace) -> Iterator["ForwardModel"]:
    """The model on the ranks of this run, whose environment is prepared, and which part behind the block.

    Raises CheckpointError where its weights are not whole.
    """
    from megatron.launch.distributed import distributed
    from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
    from megatron.tools.evaluation.scoring import open_forward

    silence_known_warnings()
    parallel = ParallelConfig(
        model_parallel_size=args.model_parallel_size or 1,
        pipe_parallel_size=args.pipe_parallel_size,
        world_size=world_size(os.environ),
    )
    with distributed(parallel) as layout:
        with deepspeed_silenced(verbose=False):
            model = open_forward(source, layout, args.dtype, pipeline=parallel.uses_pipeline)
        yield model


def tell(told: Mapping[str, Any], file: Path | None) -> None:
    """Print a result as JSON, and write it into ``file``. Raises as ``atomic_file`` does."""
    text = json.dumps(told, indent=2, default=str)  # lm-eval tells functions by name
    print(text, flush=True)
    if file:
        with atomic_file(file, "--json") as out:
            out.write(text + "\n")
