"""Tokenizers that are converted from and to Hugging Face folders; the other kinds are copied. No torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from megatron.common.errors import CheckpointError, DataError
from megatron.common.reading import is_present
from megatron.common.tokenizer_files import (
    GPT2_BPE,
    SENTENCEPIECE,
    TOKENIZER_FILES,
    other_words,
    tokenizer_files,
)
from megatron.config import ModelConfig
from megatron.model.architectures import BERT
from megatron.model.huggingface import BERT_FORMAT, GPT2_FORMAT, T5_FORMAT, format_of, read_json
from megatron.tokenizer.base import EOD, check_ids
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer, read_byte_vocabulary, read_merges
from megatron.tokenizer.published import read_encoder
from megatron.tokenizer.words import PAD, WordPieceTokenizer, check_special, read_pieces

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
ADDED = "added_tokens.json"
LOWER_CASE, CASED = BERT.tokenizers
(SENTENCEPIECE_MODEL,) = TOKENIZER_FILES[SENTENCEPIECE]
TOKENIZERS = (TOKENIZER, SENTENCEPIECE_MODEL)
"""Files that are a tokenizer by themselves."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that is converted: byte-level BPE, BERT's WordPiece, or words. Other tokenizers are copied."""

    kind: str
    """The value of ``--tokenizer-type``."""
    tokens: Mapping[str, int]
    merges: Sequence[tuple[str, str]] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """File names of the vocabulary and, for BPE, the merges."""
        return TOKENIZER_FILES[self.kind]

    def files(self) -> dict[str, str]:
        """Content of each file by name."""
        if self.kind in (LOWER_CASE, CASED):
            lines = sorted(self.tokens, key=self.tokens.__getitem__)
        else:
            lines = [json.dumps(dict(self.tokens), ensure_ascii=False)]
        merges = ["#version: 0.2", *map(" ".join, self.merges)]  # Hugging Face ignores the first line
        texts = ("".join(f"{line}\n" for line in text) for text in (lines, merges))
        return dict(zip(self.names, texts, strict=False))

    def write(self, folder: Path, *, positions: int | None = None) -> None:
        """Write the files and, if the context length ``positions`` is given, a ``tokenizer_config.json``."""
        for name, text in self.files().items():
            (folder / name).write_text(text, encoding="utf-8")
        if positions is None:
            return
        settings: dict[str, Any] = {"model_max_length": positions}
        if self.kind == GPT2_BPE:
            ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOD)
            settings |= {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **ends}
        else:
            settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": self.kind == LOWER_CASE}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def model_settings(self) -> dict[str, Any]:
        """Entries about the tokenizer in the model's ``config.json``."""
        return {} if self.kind == GPT2_BPE else {"pad_token_id": self.tokens[PAD]}


def read_bpe(vocab_file: str | None, merge_file: str | None) -> Vocabulary:
    """Read a BPE from two files. Raises DataError if they are missing, broken, or do not match."""
    GPT2BPETokenizer(vocab_file, merge_file)
    assert vocab_file is not None and merge_file is not None, "the tokenizer has checked them"
    tokens = read_byte_vocabulary(vocab_file)
    return Vocabulary(GPT2_BPE, tokens, read_merges(merge_file, tokens))


def read_word_pieces(vocab_file: str, merge_file: str | None, *, lower_case: bool) -> Vocabulary:
    """Read a WordPiece from a ``vocab.txt``. Raises DataError if it is missing or broken, or merges are given."""
    WordPieceTokenizer(vocab_file, merge_file, lower_case=lower_case)
    return Vocabulary(LOWER_CASE if lower_case else CASED, read_pieces(vocab_file))


def read_run_tokenizer(
    description: Mapping[str, Any], config: ModelConfig, vocab_file: str | None, merge_file: str | None
) -> Vocabulary | None:
    """The tokenizer of a training run, from the given files or the files in its ``run.json``.

    None unless it is a BPE of GPT-2 or a WordPiece of BERT; T5's has sentinels, which transformers' WordPiece lacks.
    Raises DataError as ``read_bpe``, and if its size differs from the vocabulary size of the model.
    """
    data = description["config"]["data"]
    kind, form = data["tokenizer_type"], format_of(config)
    if kind in (GPT2_BPE, LOWER_CASE, CASED):
        vocab_file, merge_file = vocab_file or data["vocab_file"], merge_file or data["merge_file"]
    if form is not BERT_FORMAT:
        vocab_file, merge_file = tokenizer_files(GPT2_BPE, vocab_file, merge_file, None)
    if form is T5_FORMAT or vocab_file is merge_file is None:
        return None
    if form is BERT_FORMAT and vocab_file is not None:
        tokenizer = read_word_pieces(vocab_file, merge_file, lower_case=kind != CASED)
    else:
        tokenizer = read_bpe(vocab_file, merge_file)
    if len(tokenizer.tokens) != config.vocab_size:
        flags = "the --vocab-file" if form is BERT_FORMAT else "the --vocab-file and the --merge-file"
        raise DataError(
            f"{vocab_file} has {len(tokenizer.tokens)} tokens, and the model {config.vocab_size}; give {flags} that it "
            "was trained with"
        )
    return tokenizer


def read_folder_tokenizer(folder: Path, config: ModelConfig) -> Vocabulary | None:
    """The tokenizer in a Hugging Face folder with the model ``config``: ``tokenizer.json``, or vocabulary files.

    None if there is none, or a kind that is not converted. Raises CheckpointError or DataError if it cannot be used.
    """
    form = format_of(config)
    if form.keeps_rows:
        return _llama_bpe(folder, config)
    if form is not GPT2_FORMAT and form is not BERT_FORMAT:
        return None
    if form is GPT2_FORMAT:
        _check_words(folder)
    if is_present(file := folder / TOKENIZER):
        if form is GPT2_FORMAT and not _is_gpt2s(file):
            return None
        return _read_tokenizer_json(file, is_bpe=form is GPT2_FORMAT)
    paths = [folder / name for name in TOKENIZER_FILES[GPT2_BPE if form is GPT2_FORMAT else LOWER_CASE]]
    if not all(map(is_present, paths)):
        return None
    if form is GPT2_FORMAT:
        vocabulary = read_bpe(*map(str, paths))
    else:
        settings = settings_in(folder)
        vocabulary = read_word_pieces(str(paths[0]), None, lower_case=bool(settings.get("do_lower_case", True)))
    tokens = {**_added_tokens(folder), **vocabulary.tokens}
    check_ids(f"{paths[0]} with the added tokens beside it", tokens)
    return replace(vocabulary, tokens=tokens)


def settings_in(folder: Path, name: str = SETTINGS) -> dict[str, Any]:
    """The object in a file of ``folder``, empty without the file. Raises CheckpointError if it is broken."""
    return read_json(folder / name) if is_present(folder / name) else {}


def _check_words(folder: Path) -> None:
    """Raise CheckpointError if transformers divides text in another way than the tokenizer of a GPT-2 in ``folder``.

    Its GPT2Tokenizer takes the tokens of a tokenizer.json, but divides text in GPT-2's way.
    """
    settings = settings_in(folder)
    adds_space, file = bool(settings.get("add_prefix_space")), folder / TOKENIZER
    if settings.get("tokenizer_class", "GPT2Tokenizer") not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        return
    if adds_space and not is_present(file):
        raise CheckpointError(f"{folder / SETTINGS}: add_prefix_space needs the {TOKENIZER} of save_pretrained")
    if other_words(GPT2_BPE, str(file), add_prefix_space=adds_space):
        raise CheckpointError(
            f"{file} divides text in another way than GPT2Tokenizer, with which transformers reads it: name another "
            f"tokenizer_class in {folder / SETTINGS}, such as PreTrainedTokenizerFast"
        )


def _is_gpt2s(file: Path) -> bool:
    """Whether the tokenizer.json of a GPT-2 is GPT-2's BPE; any other is read as transformers reads it."""
    if other_words(GPT2_BPE, str(file)):
        return False
    bpe = _read_tokenizer_json(file, is_bpe=True)
    merged = {left + right for left, right in bpe.merges}
    return {EOD, *pre_tokenizers.ByteLevel.alphabet(), *merged} <= bpe.tokens.keys()


def _added_tokens(folder: Path) -> dict[str, int]:
    """Tokens and ids that a folder without ``tokenizer.json`` adds to its vocabulary file. Raises CheckpointError."""
    try:
        decoder = (settings_in(folder).get("added_tokens_decoder") or {}).items()
        return settings_in(folder, ADDED) | {token["content"]: int(id) for id, token in decoder}
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{folder / SETTINGS}: added_tokens_decoder does not map ids to tokens") from None


def _llama_bpe(folder: Path, config: ModelConfig) -> Vocabulary | None:
    """GPT-2's BPE next to a Llama model of this suite; None for published models, whose tokenizer is one file."""
    paths = [folder / name for name in TOKENIZER_FILES[GPT2_BPE]]
    if any(is_present(folder / name) for name in TOKENIZERS) or not all(map(is_present, paths)):
        return None
    vocabulary = read_json(paths[0])
    if EOD not in vocabulary or len(vocabulary) != config.vocab_size:  # such as Qwen2's
        return None
    return read_bpe(*map(str, paths))


def _read_tokenizer_json(file: Path, *, is_bpe: bool) -> Vocabulary:
    """Read a ``tokenizer.json``, including its added tokens.

    Raises CheckpointError unless it is a BPE or, without ``is_bpe``, a WordPiece; DataError for ids with gaps.
    """
    tree, merges = read_json(file), []
    try:
        model, normalizer = tree["model"], tree.get("normalizer")
        tokens = {**model["vocab"], **{token["content"]: token["id"] for token in tree.get("added_tokens", ())}}
        is_expected = model["type"] == ("BPE" if is_bpe else "WordPiece")
        if is_bpe and is_expected:
            pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
            merges = [(left, right) for left, right in pairs]
    except (KeyError, TypeError, AttributeError, ValueError):
        is_expected = False
    if not is_expected:
        what = "a byte-level BPE, which GPT-2 uses" if is_bpe else "a WordPiece, which BERT uses"
        raise CheckpointError(f"{file} is not {what}; move the file away to convert without it")
    check_ids(str(file), tokens)
    if is_bpe:
        return Vocabulary(GPT2_BPE, tokens, merges)
    check_special(str(file), tokens)
    lower_case = isinstance(normalizer, dict) and normalizer.get("lowercase")
    return Vocabulary(LOWER_CASE if lower_case else CASED, tokens)


def count_tokens(folder: Path) -> int | None:
    """The number of tokens of the tokenizer.json or vocab.json in a folder, including added tokens.

    None if there is neither. Raises CheckpointError or DataError if a run could not read the file.
    """
    file, vocabulary = folder / TOKENIZER, folder / TOKENIZER_FILES[GPT2_BPE][0]
    if not is_present(file):
        return len(read_json(vocabulary) | _added_tokens(folder)) if is_present(vocabulary) else None
    encoder = read_encoder(str(file), settings_in(folder))
    return max(encoder.get_vocab(with_added_tokens=True).values(), default=-1) + 1
