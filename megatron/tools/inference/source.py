"""Where a model comes from: the flags that name it, its configuration and its tokenizer. No torch here."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.checkpoint.fingerprint import tokenizer_hash
from megatron.config import ModelConfig
from megatron.config.data import (
    HUGGINGFACE,
    PUBLISHED,
    TOKENIZER_TYPES,
    check_tokenizer_folder,
    tokenizer_files,
    tokenizer_kind,
    unused_merges,
    used_merges,
)
from megatron.config.environment import check_place, rank, world_size
from megatron.config.errors import ConfigError
from megatron.config.fields import inside, interval_as_text
from megatron.config.huggingface import format_of, llama, t5
from megatron.config.huggingface import read_config as read_folder_config
from megatron.model.architectures import GPT2, T5
from megatron.model.spec import ArchitectureSpec
from megatron.tokenizer import TOKENIZERS, Tokenizer, build_tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tools.convert.huggingface_files import BPE, read_bpe, read_folder_bpe
from megatron.tools.convert.inspection import Found, find, read_config, read_description


@dataclass(frozen=True)
class TokenizerFiles:
    """Files to use instead of those that the source names."""

    vocab_file: str | None = None
    merge_file: str | None = None
    folder: str | None = None
    """With both."""

    def of_kind(self, kind: str) -> tuple[str | None, str | None]:
        """Vocabulary and merges. Raises ConfigError or DataError if they are given twice, or are not in the folder."""
        files = {"--vocab-file": self.vocab_file, "--merge-file": self.merge_file}
        if given := [f"{flag} {file}" for flag, file in files.items() if file is not None and self.folder is not None]:
            raise ConfigError(f"--tokenizer-model {self.folder} and {given[0]} exclude each other: give one")
        check_tokenizer_folder(kind, self.folder)
        return tokenizer_files(kind, self.vocab_file, self.merge_file, self.folder)


@dataclass(frozen=True)
class Source:
    """A path that holds a model: a checkpoint of any layout, merged weights or a Hugging Face folder."""

    found: Found
    config: ModelConfig
    """The whole model in fp32, its vocabulary not padded."""
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The path, with the tag if it is a checkpoint folder."""
        saved = self.found.saved
        return str(self.found.path if saved is None else saved.path)

    @property
    def warnings(self) -> list[str]:
        """What is wrong with newer checkpoints of the folder, which are passed over for this one."""
        saved = self.found.saved
        return [] if saved is None else [f"{problem}; taking {saved.tag}" for problem in saved.newer_problems]


def open_source(
    path: Path, files: TokenizerFiles = TokenizerFiles(), accepted: Sequence[ArchitectureSpec] = (GPT2,)
) -> Source:
    """The configuration and the tokenizer of the model at ``path``, which must match. Reads no weights.

    The model is of one of the ``accepted`` architectures.

    Raises:
        ConfigError: the path or a file of the tokenizer is missing, or the tokenizer is not the one that the model
            was trained with.
        DataError: a file of the tokenizer is broken.
        CheckpointError: the path holds no model, or an incomplete one.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder; name a checkpoint")
    found = find(path)
    config = read_config(found)
    if config is None:
        raise ConfigError(f"{path} does not describe its model; name the checkpoint that it was made from")
    names = [architecture.name for architecture in accepted]
    if config.architecture not in names:
        reasons = {GPT2.name: "has no encoder", T5.name: "has an encoder"}
        what = reasons.get(config.architecture, "cannot generate text")
        raise ConfigError(f"{path} is a {config.architecture} model, which {what}: name a {names[0]} model")
    tokenizer: Tokenizer
    if found.kind != "huggingface":
        description = read_description(found)
        assert description is not None, "it describes the model"
        tokenizer = _run_tokenizer(path, description, files)
    elif format_of(config) in (llama, t5):
        tokenizer = _published_tokenizer(path, config, files)
    else:
        bpe = _folder_bpe(found, files)
        config, tokenizer = read_folder_config(path, vocab_size=len(bpe.vocabulary)), _tokenizer_of(bpe)
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigError(
            f"{path} is a model of {config.vocab_size} tokens, and the vocabulary has {tokenizer.vocab_size}; give the "
            "--vocab-file and the --merge-file that it was trained with"
        )
    return Source(found, config, tokenizer)


def config_on(config: ModelConfig, size: int, dtype: str) -> ModelConfig:
    """The same model for ``size`` tensor-parallel ranks, without the kernels configured for training.

    No token is dropped: which ones are depends on the padding and on later tokens.

    Raises ConfigError if so many ranks cannot share it.
    """
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"{size} tensor-parallel ranks cannot share a model of {name} {getattr(config, name)}; start a number "
                "of processes that divides it"
            )
    groups = config.query_groups
    if groups % size and size % groups:
        raise ConfigError(
            f"{size} tensor-parallel ranks cannot share a model of {groups} query groups: neither is a multiple of the "
            "other; start another number of processes"
        )
    return replace(
        config,
        padded_vocab_size=-(-config.vocab_size // size) * size,
        dtype=dtype,
        fused_kernels="torch",
        compile=False,  # it would recompile for each length of a prompt
        bias_gelu_fusion=False,
        bias_dropout_fusion=False,
        recomputes_attention=False,
        moe_expert_capacity_factor=0.0,
    )


def _run_tokenizer(path: Path, description: Mapping[str, Any], files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a model trained by this project."""
    data = description["config"]["data"]
    kind = data["tokenizer_type"]
    vocab_file, merge_file = files.of_kind(kind)
    chosen = (vocab_file or data["vocab_file"], used_merges(kind, merge_file or data["merge_file"]))
    flags = ("--tokenizer-model",) if kind in PUBLISHED else ("--vocab-file", "--merge-file")
    for flag, file in zip(flags, chosen, strict=False):
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"{flag} {file}: no such file; name the one that {path} was trained with")
    expected_hash = data.get("tokenizer_hash")
    extra_ids = data.get("vocab_extra_ids", 0) if data.get("decoder_seq_length") else 0
    tokenizer = build_tokenizer(kind, *chosen, data.get("vocab_size"), data.get("eod_text"), extra_ids)
    if expected_hash and tokenizer_hash(kind, *chosen, eod=tokenizer.eod) != expected_hash:
        raise ConfigError(
            f"{' and '.join(file for file in chosen if file)}: another tokenizer than the one that {path} was trained "
            f"with (their hashes differ); give its {' and '.join(flags)}"
        )
    return tokenizer


def _published_tokenizer(path: Path, config: ModelConfig, files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a Hugging Face folder with a model of the Llama family."""
    folder = files.folder or str(path)
    kind = tokenizer_kind(HUGGINGFACE, folder)
    vocab_file, _ = tokenizer_files(kind, None, None, folder)
    if vocab_file is None or not Path(vocab_file).is_file():
        raise ConfigError(f"{folder} holds no tokenizer; give --tokenizer-model")
    return build_tokenizer(kind, vocab_file, None, config.vocab_size)


def _folder_bpe(found: Found, files: TokenizerFiles) -> BPE:
    """The tokenizer of a Hugging Face folder."""
    own = read_folder_bpe(found.path)
    if files == TokenizerFiles():
        if own is None:
            raise ConfigError(f"{found.path} holds no tokenizer; give --vocab-file and --merge-file")
        return own
    vocab_file, merge_file = files.of_kind("GPT2BPETokenizer")
    for flag, file in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if file is None or not Path(file).is_file():
            raise ConfigError(f"{flag} {file or 'is missing'}: a Hugging Face folder takes two files or none")
    assert vocab_file is not None and merge_file is not None
    bpe, config = read_bpe(vocab_file, merge_file), read_config(found)
    assert config is not None, "a Hugging Face folder has a config.json"
    if own is None and len(bpe.vocabulary) != config.vocab_size:
        raise ConfigError(f"{vocab_file} has {len(bpe.vocabulary)} tokens, and {found.path} has {config.vocab_size}")
    if own is not None and (dict(bpe.vocabulary), list(bpe.merges)) != (dict(own.vocabulary), list(own.merges)):
        raise ConfigError(f"{vocab_file}: another tokenizer than that in {found.path}; leave the two flags out")
    return bpe


def _tokenizer_of(bpe: BPE) -> Tokenizer:
    with TemporaryDirectory() as folder:
        bpe.write(Path(folder))
        return GPT2BPETokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt")


_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
"""Model flags of training scripts. The checkpoint knows them, so they are only compared."""
_OVERRIDES = ("pre_tokens", "next_tokens", "shape_order")
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
    group.add_argument(
        "--tokenizer-model",
        "--tokenizer-name-or-path",
        metavar="PATH",
        help="folder with them, instead of the two flags",
    )
    group.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, help="accepted if it matches the model")
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
    group.add_argument(
        "--next-tokens",
        "--next-tockens",
        type=int,
        metavar="N",
        help="following tokens; has no effect on a causal model",
    )
    group.add_argument(
        "--shape-order", choices=("BSH", "SBH"), help="dimension order of hidden states (default: the model's)"
    )
    group.add_argument("--local-rank", type=int, help=argparse.SUPPRESS)  # the launcher's


def check_values(args: argparse.Namespace, intervals: Mapping[str, str]) -> None:
    """Raises ConfigError with a line for each value of ``args`` outside its interval, such as ``"[0, 1)"``."""
    problems = [
        f"--{name.replace('_', '-')} {_shown(value)} must be {interval_as_text(interval)}"
        for name, interval in intervals.items()
        if (value := getattr(args, name)) is not None and not inside(value, interval)
    ]
    if problems:
        raise ConfigError(problems)


def _shown(value: float) -> str:
    """A number for messages; a whole one may be too large for a float."""
    return f"{value:g}" if isinstance(value, float) or abs(value) < 10**15 else f"of {len(str(abs(value)))} digits"


def tensor_ranks(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Tensor-parallel size: all processes. Raises ConfigError if the launcher started another number than asked for."""
    check_place(environ)
    started = world_size(environ)
    if args.model_parallel_size not in (None, started):
        raise ConfigError(
            f"--model-parallel-size {args.model_parallel_size} with {started} started: start as many with "
            f"deepspeed --num_gpus {args.model_parallel_size}"
        )
    return started


def shared_source(
    args: argparse.Namespace, environ: Mapping[str, str], accepted: Sequence[ArchitectureSpec] = (GPT2,)
) -> tuple[Source, int]:
    """The model that ``args`` name, and the number of processes, which share it. Raises as the functions it calls."""
    ranks = tensor_ranks(args, environ)
    source = source_of(args, environ, accepted)
    config_on(source.config, ranks, args.dtype)  # an error here is printed once, not by all ranks
    return source, ranks


def context_length(args: argparse.Namespace, source: Source) -> int:
    """``--seq-length``, by default the model's. Raises ConfigError if it is longer than that."""
    positions = source.config.max_position_embeddings
    if args.seq_length and args.seq_length > positions:
        raise ConfigError(f"--seq-length {args.seq_length} is more than the {positions} positions of {source.name}")
    return args.seq_length or positions


def source_of(
    args: argparse.Namespace, environ: Mapping[str, str], accepted: Sequence[ArchitectureSpec] = (GPT2,)
) -> Source:
    """The model that ``args`` name, with the attention window that they choose, if they do.

    Raises as ``open_source``, and ConfigError if flags do not match the model.
    """
    check_values(args, {"pre_tokens": "[0, inf)", "next_tokens": "[0, inf)"})
    source = open_source(args.load, TokenizerFiles(args.vocab_file, args.merge_file, args.tokenizer_model), accepted)
    sizes = {name: getattr(args, name) for name in _SIZES}
    problems = [
        f"--{name.replace('_', '-')} {value}, and {source.name} has {getattr(source.config, name)}: leave it out"
        for name, value in sizes.items()
        if value not in (None, getattr(source.config, name))
    ]
    kind = args.tokenizer_type and tokenizer_kind(args.tokenizer_type, args.tokenizer_model)
    if kind is not None and type(source.tokenizer) is not TOKENIZERS[kind]:
        problems.append(f"--tokenizer-type {args.tokenizer_type} is not that of {source.name}: leave it out")
    if problems:
        raise ConfigError(problems)
    chosen = {name: value for name in _OVERRIDES if (value := getattr(args, name)) is not None}
    changes = [
        f"--{name.replace('_', '-')} {value} replaces {getattr(source.config, name)} of {source.name}"
        for name, value in chosen.items()
        if value != getattr(source.config, name)
    ]
    unused = unused_merges(type(source.tokenizer).__name__, args.merge_file)
    if not rank(environ):
        for warning in [*source.warnings, *changes, *unused]:
            print(f"{Path(sys.argv[0]).name}: warning: {warning}", file=sys.stderr)
    return replace(source, config=replace(source.config, **chosen))
