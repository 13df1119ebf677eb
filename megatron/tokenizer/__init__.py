"""Tokenizers: build them from files, and encode text to token ids and back. No torch here."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

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
"""Classes of tokenizers with files, by kind; built from (vocab_file, merge_file), and kinds of ``PUBLISHED`` from
vocab_file, ``vocab_size`` and ``eod_token``."""


def build_tokenizer(
    kind: str | Namespace,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    vocab_size: int | None = None,
    eod_token: str | None = None,
    extra_ids: int = 0,
) -> Tokenizer:
    """Build a tokenizer of ``TOKENIZERS`` from its files, or a NullTokenizer of ``vocab_size`` tokens.

    For kinds of ``PUBLISHED``, ``vocab_size`` may exceed the number of tokens, for a model with a larger embedding, and
    ``eod_token`` replaces the end-of-document token of the files. WordPiece gets ``extra_ids`` sentinels in addition.
    As in Megatron-LM, ``build_tokenizer(args)`` takes the parsed arguments of a preprocessing script instead.

    Raises ConfigError for an unknown kind, and DataError for a file that is missing (or None), superfluous, broken,
    or inconsistent with the other file.
    """
    if isinstance(kind, Namespace):
        return _from_arguments(kind)
    if kind == NULL_TOKENIZER and vocab_size is not None:
        return NullTokenizer(vocab_size)
    if kind not in TOKENIZERS:
        raise ConfigError(f"--tokenizer-type {kind} is unknown: choose one of {', '.join(TOKENIZERS)}")
    if kind in PUBLISHED:
        tokenizer = TOKENIZERS[kind](vocab_file, vocab_size=vocab_size, eod_token=eod_token)
    else:
        tokenizer = TOKENIZERS[kind](vocab_file, merge_file, **({"extra_ids": extra_ids} if extra_ids else {}))
    tokenizer.source = (kind, vocab_file, merge_file)
    return tokenizer


def _from_arguments(args: Namespace) -> Tokenizer:
    """Build the tokenizer of a script's arguments, and set their ``padded_vocab_size`` as Megatron-LM does."""
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
    """The span vocabulary of a published T5: its first ``count`` sentinels, and padding as first token of the decoder.

    Raises DataError if the tokenizer has fewer sentinels.
    """
    special, names = tokenizer.special_tokens, [f"<extra_id_{n}>" for n in range(count)]
    for name in (*names, "<pad>"):
        if name not in special:
            raise DataError(
                f"{tokenizer.path} has no special token {name}: lower --vocab-extra-ids, or use the tokenizer of a T5"
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
    """The tokens of T5's span corruption: text, special tokens and sentinels."""

    size: int
    text_tokens: int
    """Ids of tokens in data sets are below it."""
    bos: int
    """First token of the decoder's input."""
    eos: int
    sentinels: tuple[int, ...]
    """Tokens that replace the spans of a sample, in order."""
    separators: tuple[int, ...]
    """Special tokens in texts, which belong to no word."""
    continues: np.ndarray
    """Whether each token continues a word, bool [size]."""


def span_vocabulary(data: DataConfig) -> SpanVocabulary:
    """The span vocabulary of a run of T5. Raises DataError as ``build_tokenizer``."""
    tokenizer, count = tokenizer_of(data), data.extra_ids
    size = tokenizer.vocab_size
    if isinstance(tokenizer, NullTokenizer):  # sentinels precede the special tokens
        first = tokenizer.pad - count
        if first < 1:
            raise DataError(f"--vocab-size {size} leaves no token for text beside {count} sentinels: raise it")
        sentinels = tuple(range(first, tokenizer.pad))
        return SpanVocabulary(size, first, tokenizer.cls, tokenizer.eod, sentinels, (), tokenizer.continues)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _published_spans(tokenizer, count)
    assert isinstance(tokenizer, WordPieceTokenizer), "a rule rejects other tokenizers"
    text, separators = size - len(tokenizer.extra), (tokenizer.cls, tokenizer.sep)
    sentinels = tuple(range(text + 2, size))
    return SpanVocabulary(size, text, text, text + 1, sentinels, separators, tokenizer.continues)
