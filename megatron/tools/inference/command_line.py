"""Flags that all tools share that use a model. No torch here."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron.config.environment import check_place, rank, world_size
from megatron.config.errors import ConfigError
from megatron.config.fields import inside, interval_in_words
from megatron.tokenizer import TOKENIZERS
from megatron.tools.inference.source import Source, TokenizerFiles, open_source

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""What a command line for training says of the model, too, and the checkpoint knows."""


def add_model_flags(parser: argparse.ArgumentParser, *, shared_by: str = "as many as are started") -> None:
    """The model, its tokenizer, and how it lies on the processes, of which ``shared_by`` share it unless told."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="PATH",
        help="checkpoint folder, one tag of it, merged safetensors or a Hugging Face GPT-2",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary, if it is no longer where the run found it")
    group.add_argument("--merge-file", metavar="FILE", help="merges, if they are no longer where the run found them")
    group.add_argument("--tokenizer-type", choices=TOKENIZERS, help="accepted if it is the model's")
    types = group.add_mutually_exclusive_group()
    types.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", default="fp32", help="in bfloat16")
    types.add_argument("--fp16", dest="dtype", action="store_const", const="fp16", help="in half precision")
    group.add_argument(
        "--model-parallel-size",
        "--tensor-model-parallel-size",
        type=int,
        metavar="N",
        help=f"processes that share each layer (default: {shared_by})",
    )
    for name in _SIZES:
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="accepted if it is the model's")
    group.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # the launcher's


def check_values(args: argparse.Namespace, intervals: Mapping[str, str]) -> None:
    """Raises ConfigError with a line for each value of ``args`` outside its interval, such as ``"[0, 1)"``."""
    problems = [
        f"--{name.replace('_', '-')} {value:g} must be {interval_in_words(interval)}"
        for name, interval in intervals.items()
        if (value := getattr(args, name)) is not None and not inside(value, interval)
    ]
    if problems:
        raise ConfigError(problems)


def tensor_ranks(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Processes that share each layer, where all do. Raises ConfigError where the launcher says otherwise."""
    check_place(environ)
    started = world_size(environ)
    if args.model_parallel_size not in (None, started):
        raise ConfigError(
            f"--model-parallel-size {args.model_parallel_size} with {started} started: start as many with "
            f"deepspeed --num_gpus {args.model_parallel_size}"
        )
    return started


def source_of(args: argparse.Namespace, environ: Mapping[str, str]) -> Source:
    """The model that ``args`` name. Raises as ``open_source``, and ConfigError where they say what it is not."""
    source = open_source(args.load, TokenizerFiles(args.vocab_file, args.merge_file))
    said = {name: getattr(args, name) for name in _SIZES}
    problems = [
        f"--{name.replace('_', '-')} {value}, and {source.name} has {getattr(source.config, name)}: leave it out"
        for name, value in said.items()
        if value not in (None, getattr(source.config, name))
    ]
    if args.tokenizer_type is not None and type(source.tokenizer) is not TOKENIZERS[args.tokenizer_type]:
        problems.append(f"--tokenizer-type {args.tokenizer_type} is not that of {source.name}: leave it out")
    if problems:
        raise ConfigError(problems)
    if not rank(environ):
        for warning in source.warnings:
            print(f"{Path(sys.argv[0]).name}: warning: {warning}", file=sys.stderr)
    return source
