"""Flags of tools for the model, its tokenizer and the number of processes. Does not import torch."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron.common.environment import check_place, rank, world_size
from megatron.common.errors import ConfigError
from megatron.common.tokenizer_files import TOKENIZER_TYPES, tokenizer_kind, unused_merges
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec
from megatron.tokenizer import TOKENIZERS
from megatron.tools.command_line import check_values, print_warnings
from megatron.tools.inference.source import Source, TokenizerFiles, config_on, open_source

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""Model flags of training scripts that are only compared with the checkpoint's values."""
_OVERRIDES = ("pre_tokens", "shape_order")
"""Model flags that replace the checkpoint's values: no weight depends on them."""


def add_model_flags(parser: argparse.ArgumentParser, *, shared_by: str = "all that are started") -> None:
    """Add the flags for the model, its tokenizer, and the processes that share it, by default ``shared_by``."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--load",
        type=Path,
        required=True,
        metavar="PATH",
        help="checkpoint folder, one tag of it, merged safetensors or a Hugging Face folder",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary, if it was moved since training")
    group.add_argument("--merge-file", metavar="FILE", help="merges, if they were moved since training")
    group.add_argument("--tokenizer-model", "--tokenizer-name-or-path", metavar="PATH", help="folder with both files")
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="accepted if it matches the model")
    group.add_argument(
        "--prepend-bos",
        action=argparse.BooleanOptionalAction,
        help="begin texts with the bos_token (default: as the tokenizer of a Hugging Face folder does)",
    )
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
        group.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help="accepted if it matches the model"
        )
    group.add_argument(
        "--pre-tokens",
        "--pre-tockens",
        type=int,
        metavar="N",
        help="preceding tokens that each token attends to (default: the model's)",
    )
    group.add_argument("--next-tokens", "--next-tockens", type=int, metavar="N", help="no effect on a causal model")
    group.add_argument(
        "--shape-order", choices=("BSH", "SBH"), help="dimension order of hidden states (default: the model's)"
    )
    group.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # the launcher's


def add_chat_template_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the template of conversations."""
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="template of Jinja for conversations (default: the one of fine-tuning, or in the tokenizer's folder)",
    )


def shared_source(
    args: argparse.Namespace, environ: Mapping[str, str], accepted: Sequence[ArchitectureSpec] = (GPT2,)
) -> tuple[Source, int]:
    """The model that ``args`` name, and the number of processes that it is sharded over. Raises as ``source_of``."""
    check_place(environ)
    ranks, size = world_size(environ), args.model_parallel_size
    if size not in (None, ranks):
        raise ConfigError(
            f"--model-parallel-size {size} with {ranks} started: start as many with deepspeed --num_gpus {size}"
        )
    source = source_of(args, environ, accepted)
    config_on(source.config, ranks, args.dtype)  # an error here is printed once, not by all ranks
    return source, ranks


def context_length(args: argparse.Namespace, source: Source) -> int:
    """``--seq-length``, by default the model's maximum. Raises ConfigError if it is longer."""
    positions = source.config.max_position_embeddings
    if args.seq_length and args.seq_length > positions:
        raise ConfigError(f"--seq-length {args.seq_length} is more than the {positions} positions of {source.name}")
    return args.seq_length or positions


def source_of(
    args: argparse.Namespace, environ: Mapping[str, str], accepted: Sequence[ArchitectureSpec] = (GPT2,)
) -> Source:
    """The model that ``args`` name, with their --pre-tokens and --shape-order if given.

    Raises as ``open_source``, and ConfigError if flags do not match the model.
    """
    check_values(args, {"pre_tokens": "[0, inf)"})
    source = open_source(args.load, TokenizerFiles(args.vocab_file, args.merge_file, args.tokenizer_model), accepted)
    sizes = {name: getattr(args, name) for name in _SIZES}
    problems = [
        f"--{name.replace('_', '-')} {value}, and {source.name} has {getattr(source.config, name)}: leave it out"
        for name, value in sizes.items()
        if value not in (None, getattr(source.config, name))
    ]
    kind = args.tokenizer_type and tokenizer_kind(args.tokenizer_type, args.tokenizer_model)
    if kind is not None and type(source.tokenizer) is not TOKENIZERS[kind]:
        problems.append(f"--tokenizer-type {args.tokenizer_type} is not the tokenizer of {source.name}: leave it out")
    bos = source.tokenizer.bos
    if args.prepend_bos and bos is None:
        problems.append(f"--prepend-bos: the tokenizer of {source.name} has no bos_token: leave it out")
    if problems:
        raise ConfigError(problems)
    if args.prepend_bos is not None:
        source.tokenizer.opening = () if bos is None or not args.prepend_bos else (bos,)
    chosen = {name: value for name in _OVERRIDES if (value := getattr(args, name)) is not None}
    changes = [
        f"--{name.replace('_', '-')} {value} replaces {getattr(source.config, name)} of {source.name}"
        for name, value in chosen.items()
        if value != getattr(source.config, name)
    ]
    unused = unused_merges(type(source.tokenizer).__name__, args.merge_file)
    if not rank(environ):
        print_warnings([*source.warnings, *changes, *unused])
    given = source.config.pre_tokens_given or "pre_tokens" in chosen
    return replace(source, config=replace(source.config, **chosen, pre_tokens_given=given))
