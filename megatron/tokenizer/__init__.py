"""Tokenizers: text to token ids and back. No torch here."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.common.errors import ConfigError, DataError
from megatron.common.tokenizer_files import (
    HUGGINGFACE,
    NULL_TOKENIZER,
    PUBLISHED,
    SENTENCEPIECE,
    tokenizer_files,
    tokenizer_kind,
    used_merges,
)
from megatron.config.data import DataConfig
from megatron.tokenizer.base import Tokenizer as Tokenizer
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tokenizer.published import GPTSentencePieceTokenizer, HuggingFaceTokenizer
from megatron.tokenizer.words import (
    NullTokenizer,
    WhitespaceTokenizer,
    WordPieceCase,
    WordPieceLowerCase,
    WordPieceTokenizer,
)

TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "WhitespaceTokenizer": WhitespaceTokenizer,
    "BertWordPieceLowerCase": WordPieceLowerCase,
    "BertWordPieceCase": WordPieceCase,
    HUGGINGFACE: HuggingFaceTokenizer,
    SENTENCEPIECE: GPTSentencePieceTokenizer,
}
"""Kinds of tokenizer with files, each built from (vocab_file, merge_file); those of ``PUBLISHED`` also take a
``vocab_size`` and an ``eod_token``."""


def build_tokenizer(
    kind: str | Namespace,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    eod_token: str | None = None,
    extra_ids: int = 0,
) -> Tokenizer:
    """A tokenizer of a kind of ``TOKENIZERS`` from its files, or a NullTokenizer of ``vocab_size`` tokens.

    With a kind of ``PUBLISHED``, ``vocab_size`` may be more than its tokens, for a model that has more rows, and
    ``eod_token`` ends documents instead of the token that the files name. A WordPiece has ``extra_ids`` sentinels more.
    Instead of all that, ``build_tokenizer(args)`` takes the arguments of a preprocessing script, as Megatron-LM's does.

    Raises ConfigError for an unknown kind, and DataError for a file that is missing (or None), superfluous, broken,
    or inconsistent with the other.
    """
    if isinstance(kind, Namespace):
        return _of_arguments(kind)
    if kind == NULL_TOKENIZER and vocab_size is not None:
        return NullTokenizer(vocab_size)
    if kind not in TOKENIZERS:
        raise ConfigError(f"--tokenizer-type {kind} is unknown: choose one of {', '.join(TOKENIZERS)}")
    options: dict[str, Any] = {"extra_ids": extra_ids} if extra_ids else {}
    if kind in PUBLISHED:
        options = {"vocab_size": vocab_size, "eod_token": eod_token}
    tokenizer = TOKENIZERS[kind](vocab_file, merge_file, **options)
    tokenizer.source = (kind, vocab_file, merge_file)
    return tokenizer


def _of_arguments(args: Namespace) -> Tokenizer:
    """The tokenizer that a script's arguments name, which get its padded size as ``padded_vocab_size``."""
    given = vars(args)
    model = given.get("tokenizer_model")
    kind = tokenizer_kind(given.get("tokenizer_type"), model)
    vocab_file, merge_file = tokenizer_files(kind, given.get("vocab_file"), given.get("merge_file"), model)
    extra_ids = given.get("vocab_extra_ids") or 0 if kind.startswith("BertWordPiece") else 0
    vocab_size = given.get("vocab_size") if kind in (NULL_TOKENIZER, *PUBLISHED) else None
    tokenizer = build_tokenizer(kind, vocab_file, used_merges(kind, merge_file), vocab_size, extra_ids=extra_ids)
    size = given.get("tensor_model_parallel_size") or given.get("model_parallel_size") or 1
    multiple = size * given.get("make_vocab_size_divisible_by", 128)
    args.padded_vocab_size = -(-tokenizer.vocab_size // multiple) * multiple
    return tokenizer


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer of a run. Raises as ``build_tokenizer``."""
    return build_tokenizer(
        data.tokenizer_type, data.vocab_file, data.merge_file, data.vocab_size, data.eod_text, data.extra_ids
    )


def _published_spans(tokenizer: HuggingFaceTokenizer, count: int) -> "SpanVocabulary":
    """The first ``count`` sentinels, and the padding as what the decoder reads first, as published T5 models have it.

    Raises DataError if there are not as many.
    """
    special, names = tokenizer.special_tokens, [f"<extra_id_{n}>" for n in range(count)]
    for name in (*names, "<pad>"):
        if name not in special:
            raise DataError(
                f"{tokenizer.path} has no special token {name}: lower --vocab-extra-ids, or name that of a T5"
            )
    continues = np.zeros(tokenizer.vocab_size, bool)
    for piece, id in tokenizer.pieces.items():
        continues[id] = not piece.startswith("\N{LOWER ONE EIGHTH BLOCK}") and piece not in special
    sentinels = tuple(special[name] for name in names)
    return SpanVocabulary(
        tokenizer.vocab_size,
        tokenizer.tokens,
        special["<pad>"],
        tokenizer.eod,
        sentinels,
        tuple(special.values()),
        continues,
    )


@dataclass(frozen=True)
class SpanVocabulary:
    """The tokens from which T5's samples are made."""

    size: int
    text_tokens: int
    """Those that a data set may hold are below it."""
    bos: int
    """What the decoder reads first."""
    eos: int
    sentinels: tuple[int, ...]
    """Which stand for the spans of a sample, in order."""
    separators: tuple[int, ...]
    """Tokens of a text that belong to no word."""
    continues: np.ndarray
    """Whether each token continues a word, bool [size]."""


def span_vocabulary(data: DataConfig) -> SpanVocabulary:
    """The tokens from which samples of a run for T5 are made. Raises DataError as ``build_tokenizer``."""
    tokenizer, count = tokenizer_of(data), data.extra_ids
    size = tokenizer.vocab_size
    if isinstance(tokenizer, NullTokenizer):  # in front of its own special tokens
        first = tokenizer.pad - count
        if first < 1:
            raise DataError(f"--vocab-size {size} leaves no token for text beside {count} sentinels: raise it")
        sentinels = tuple(range(first, tokenizer.pad))
        return SpanVocabulary(size, first, tokenizer.cls, tokenizer.eod, sentinels, (), tokenizer.continues)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _published_spans(tokenizer, count)
    assert isinstance(tokenizer, WordPieceTokenizer), "a rule refuses the others"
    text, separators = size - len(tokenizer.extra), (tokenizer.cls, tokenizer.sep)
    sentinels = tuple(range(text + 2, size))
    return SpanVocabulary(size, text, text, text + 1, sentinels, separators, tokenizer.continues)
