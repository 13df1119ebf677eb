"""The ranks that hold a model which is tried: their flags, and how they open it."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.cli import ToolParser
from megatron.config import ParallelConfig
from megatron.errors import ConfigError
from megatron.inference.source import Source, TokenizerFiles, open_source
from megatron.launch.launcher import world_size

if TYPE_CHECKING:
    from megatron.evaluation.stages import Forward
    from megatron.mpu.layout import ParallelLayout


class Opened(NamedTuple):
    """A model on the ranks that share it."""

    forward: "Forward"
    layout: "ParallelLayout"

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all."""
        return self.layout.rank == 0


def add_model_flags(parser: ToolParser) -> None:
    """The flags that say which model it is, and how the ranks share it."""
    add = parser.add_argument
    add(
        "--load",
        type=Path,
        required=True,
        metavar="PATH",
        help="the model: a checkpoint of any layout, merged weights, or a Hugging Face GPT-2 folder",
    )
    add("--vocab-file", metavar="FILE", help="vocabulary, if it is no longer where the training found it")
    add("--merge-file", metavar="FILE", help="merges, if they are no longer where the training found them")
    add(
        "--model-parallel-size",
        "--tensor-model-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel size: ranks that share each layer",
    )
    add(
        "--pipe-parallel-size",
        "--pipeline-model-parallel-size",
        type=int,
        default=0,
        metavar="N",
        help="pipeline stages, for a model that fits no other way; 0 is none",
    )
    add("--batch-size", "--micro-batch-size", type=int, default=8, metavar="N", help="samples that are scored together")
    add("--seq-length", type=int, metavar="N", help="tokens that the model sees at most (default: all it can)")
    precision = parser.add_mutually_exclusive_group()
    for dtype in ("bf16", "fp16"):
        precision.add_argument(
            f"--{dtype}", dest="dtype", action="store_const", const=dtype, default="fp32", help=f"compute in {dtype}"
        )
    add("--local-rank", type=int, help=argparse.SUPPRESS)  # deepspeed says it


def parse(parser: ToolParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; in names of flags, hyphens and underscores are the same. Raises ConfigError."""
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args([_hyphened(word) for word in words])
    for name, least in {"model_parallel_size": 1, "pipe_parallel_size": 0, "batch_size": 1, "seq_length": 1}.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be {least} or more")
    return args


def find_model(args: argparse.Namespace) -> tuple[Source, int]:
    """The model that ``args`` names, and how many tokens it may see. Reads no weights, and brings in no torch.

    Raises ConfigError, DataError or CheckpointError as ``open_source`` does.
    """
    source = open_source(args.load, TokenizerFiles(args.vocab_file, args.merge_file))
    most = source.config.max_position_embeddings
    if args.seq_length and args.seq_length > most:
        raise ConfigError(f"--seq-length {args.seq_length}: the model has {most} positions; choose at most so many")
    return source, args.seq_length or most


@contextmanager
def opened(source: Source, args: argparse.Namespace) -> Iterator[Opened]:
    """The model on the ranks of this run, whose environment is prepared, and which part behind the block.

    Raises ConfigError where so many ranks cannot share it, CheckpointError where its weights are not whole.
    """
    from megatron.evaluation.stages import check_ranks, open_forward
    from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
    from megatron.mpu.layout import distributed

    silence_known_warnings()
    world, stages = world_size(os.environ), max(args.pipe_parallel_size, 1)
    check_ranks(source.config, tensor=args.model_parallel_size, stages=stages, world=world)
    parallel = ParallelConfig(
        model_parallel_size=args.model_parallel_size, pipe_parallel_size=args.pipe_parallel_size, world_size=world
    )
    with distributed(parallel) as layout:
        with deepspeed_silenced(verbose=False):
            forward = open_forward(source, layout, args.dtype, pipeline=parallel.uses_pipeline)
        yield Opened(forward, layout)


def _hyphened(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
