"""Opens the path of a model: reads its configuration and its tokenizer. Does not import torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.common.errors import ConfigError
from megatron.common.tokenizer_files import (
    GPT2_BPE,
    HUGGINGFACE,
    NULL_TOKENIZER,
    PUBLISHED,
    TOKENIZER_FILES,
    check_tokenizer_folder,
    tokenizer_files,
    tokenizer_kind,
    used_merges,
)
from megatron.config import ModelConfig
from megatron.data.fingerprint import tokenizer_hash
from megatron.model.architectures import GPT2, LLAVA, T5
from megatron.model.huggingface import format_of
from megatron.model.huggingface import read_config as read_folder_config
from megatron.model.spec import ArchitectureSpec
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tools.convert.inspection import FoundCheckpoint, find, read_config, read_description
from megatron.tools.convert.vocabulary import TOKENIZERS, Vocabulary, read_bpe, read_folder_tokenizer


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer files given by flags, which replace the files that the model names."""

    vocab_file: str | None = None
    merge_file: str | None = None
    folder: str | None = None
    """A folder with both files."""

    def of_kind(self, kind: str) -> tuple[str | None, str | None]:
        """Vocabulary and merges. Raises ConfigError or DataError if they are given twice, or are not in the folder."""
        if self.folder is not None and (given := self._given[1:]):
            raise ConfigError(f"--tokenizer-model {self.folder} and {given[0]} exclude each other: give one")
        check_tokenizer_folder(kind, self.folder)
        return tokenizer_files(kind, self.vocab_file, self.merge_file, self.folder)

    def refuse(self, reason: str) -> None:
        """Raise ConfigError with the ``reason`` if a file is given."""
        if given := self._given:
            raise ConfigError(f"{given[0]} has no effect: {reason}")

    @property
    def _given(self) -> list[str]:
        flags = {"--tokenizer-model": self.folder, "--vocab-file": self.vocab_file, "--merge-file": self.merge_file}
        return [f"{flag} {file}" for flag, file in flags.items() if file is not None]


@dataclass(frozen=True)
class Source:
    """An opened model: a checkpoint of any layout, merged weights or a Hugging Face folder."""

    found: FoundCheckpoint
    config: ModelConfig
    """The model's configuration, with fp32 and an unpadded vocabulary."""
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The path, with the tag if it is a checkpoint folder."""
        saved = self.found.saved
        return str(self.found.path if saved is None else saved.path)

    @property
    def warnings(self) -> list[str]:
        """Warnings from reading the checkpoint."""
        return self.found.saved.warnings if self.found.saved else []


def open_source(
    path: Path, files: TokenizerFiles = TokenizerFiles(), accepted: Sequence[ArchitectureSpec] = (GPT2,)
) -> Source:
    """Read the configuration and the tokenizer of the model at ``path``, which must match. Reads no weights.

    The model must have one of the ``accepted`` architectures.

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
        without = "reads no images" if LLAVA.name in names else "has no encoder"
        reasons = {GPT2.name: without, T5.name: "has an encoder", LLAVA.name: "reads images"}
        reason = reasons.get(config.architecture, "cannot generate text")
        raise ConfigError(f"{path} is a {config.architecture} model, which {reason}: name one of {accepted[0].program}")
    tokenizer: Tokenizer
    if found.kind != "huggingface":
        description = read_description(found)
        assert description is not None, "it describes the model"
        tokenizer = _run_tokenizer(path, description, files)
    elif format_of(config).keeps_rows or _is_published(path, config, files):
        tokenizer = _published_tokenizer(path, config, files)
    else:
        bpe = _folder_bpe(path, config, files)
        config, tokenizer = read_folder_config(path, vocab_size=len(bpe.tokens)), _tokenizer_of(bpe)
    if tokenizer.vocab_size != config.vocab_size:
        raise ConfigError(
            f"{path} is a model of {config.vocab_size} tokens, and the vocabulary has {tokenizer.vocab_size}; give the "
            "--vocab-file and the --merge-file that it was trained with"
        )
    return Source(found, config, tokenizer)


def config_on(config: ModelConfig, size: int, dtype: str) -> ModelConfig:
    """The same model for ``size`` tensor-parallel ranks, without the kernels configured for training.

    Experts drop no tokens, since dropping would depend on padding and on later tokens.

    Raises ConfigError if ``size`` ranks cannot share it.
    """
    for name in ("num_attention_heads", "ffn_hidden_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"{size} tensor-parallel ranks cannot share a model of {name} {getattr(config, name)}; start a number "
                "of processes that divides it"
            )
    if not config.can_share_heads(size):
        raise ConfigError(
            f"{size} tensor-parallel ranks cannot share a model of {config.query_groups} query groups: start another "
            "number of processes"
        )
    return replace(
        config,
        padded_vocab_size=-(-config.vocab_size // size) * size,
        dtype=dtype,
        fused_kernels="torch",
        pre_tokens=config.pre_tokens if config.has_window else max(config.pre_tokens, config.max_position_embeddings),
        compile=False,  # it would recompile for each length of a prompt
        fp8_format="none",  # a prompt has too few tokens to gain from it
        bias_gelu_fusion=False,
        bias_dropout_fusion=False,
        recomputes_attention=False,
        moe_expert_capacity_factor=0.0,
        moe_pad_expert_input_to_capacity=False,
    )


def _run_tokenizer(path: Path, description: Mapping[str, Any], files: TokenizerFiles) -> Tokenizer:
    """The tokenizer of a model trained by this project."""
    data = description["config"]["data"]
    kind = data["tokenizer_type"]
    if kind == NULL_TOKENIZER:
        files.refuse(f"{path} has been trained on token ids, without tokenizer files")
    vocab_file, merge_file = files.of_kind(kind)
    chosen = (vocab_file or data["vocab_file"], used_merges(kind, merge_file or data["merge_file"]))
    flags = ("--tokenizer-model",) if kind in PUBLISHED else ("--vocab-file", "--merge-file")
    for flag, file in zip(flags, chosen, strict=False):
        if file is not None and not os.path.isfile(file):
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
    replace(files, folder=None).refuse(f"the tokenizer of {path} is one file: give it by --tokenizer-model")
    folder = files.folder or str(path)
    chosen, own = _tokenizer_in(folder), _tokenizer_in(str(path))
    if chosen is None:
        raise ConfigError(f"{folder} holds no tokenizer; give --tokenizer-model")
    if own not in (None, chosen) and tokenizer_hash(*own) != tokenizer_hash(*chosen):
        raise ConfigError(f"--tokenizer-model {folder}: another tokenizer than that in {path}; leave it out")
    tokenizer = build_tokenizer(*chosen, None if chosen[0] == GPT2_BPE else config.vocab_size)
    if tokenizer.adds_bos and tokenizer.bos is not None:
        tokenizer.opening = (tokenizer.bos,)
    return tokenizer


def _tokenizer_in(folder: str) -> tuple[str, str | None, str | None] | None:
    """Kind and files of the tokenizer in the folder of a model of the Llama family; None if there is none."""
    # GPT-2's files are what to-hf writes of a model that was trained here.
    for kind in (tokenizer_kind(HUGGINGFACE, folder), GPT2_BPE):
        files = tokenizer_files(kind, None, None, folder)
        if all(file and Path(file).is_file() for file in files[: len(TOKENIZER_FILES[kind])]):
            return kind, *files
    return None


def _is_published(path: Path, config: ModelConfig, files: TokenizerFiles) -> bool:
    """Whether the tokenizer of a folder with a GPT-2, or the given one, is of ``PUBLISHED`` and not GPT-2's BPE."""
    place = Path(files.folder or path)
    if place.is_file():
        return True
    return any((place / name).is_file() for name in TOKENIZERS) and read_folder_tokenizer(place, config) is None


def _folder_bpe(path: Path, config: ModelConfig, files: TokenizerFiles) -> Vocabulary:
    """The tokenizer of a Hugging Face folder with a GPT-2 model."""
    folder_bpe = read_folder_tokenizer(path, config)
    if files == TokenizerFiles():
        if folder_bpe is None:
            raise ConfigError(f"{path} holds no tokenizer; give --tokenizer-model, or --vocab-file and --merge-file")
        return folder_bpe
    vocab_file, merge_file = files.of_kind("GPT2BPETokenizer")
    for flag, file in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if file is None or not Path(file).is_file():
            raise ConfigError(f"{flag} {file or 'is missing'}: a Hugging Face folder takes two files or none")
    assert vocab_file is not None and merge_file is not None
    bpe = read_bpe(vocab_file, merge_file)
    if folder_bpe is None and len(bpe.tokens) != config.vocab_size:
        raise ConfigError(f"{vocab_file} has {len(bpe.tokens)} tokens, and {path} has {config.vocab_size}")
    if folder_bpe is not None and bpe != folder_bpe:
        raise ConfigError(f"{vocab_file}: another tokenizer than that in {path}; leave the two flags out")
    return bpe


def _tokenizer_of(bpe: Vocabulary) -> Tokenizer:
    with TemporaryDirectory() as folder:
        bpe.write(Path(folder))
        return GPT2BPETokenizer(f"{folder}/vocab.json", f"{folder}/merges.txt")
