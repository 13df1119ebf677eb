"""Tokenizers: text to token ids and back. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.config.errors import ConfigError
from megatron.tokenizer.gpt2_bpe import GPT2BPETokenizer
from megatron.tokenizer.whitespace import WhitespaceTokenizer
from megatron.tokenizer.wordpiece import WordPieceCase, WordPieceLowerCase


class Tokenizer(Protocol):
    """What a tokenizer offers. Ids run from 0 to ``vocab_size - 1``."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, the end of a document among them."""

    @property
    def eod(self) -> int:
        """Id that ends a document. No text is tokenized into it."""

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``. Raises DataError where it cannot be tokenized."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text: equal to ``tokenize`` of each, and faster."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``. Raises DataError for an id outside the vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """What a model must know of its tokenizer."""

    size: int
    """Tokens, before any padding."""
    eod: int
    """Id that ends a document."""


TOKENIZERS: dict[str, Callable[[str | None, str | None], Tokenizer]] = {
    "GPT2BPETokenizer": GPT2BPETokenizer,
    "WhitespaceTokenizer": WhitespaceTokenizer,
    "BertWordPieceLowerCase": WordPieceLowerCase,
    "BertWordPieceCase": WordPieceCase,
}
"""Kinds of tokenizer, each made from (vocab_file, merge_file)."""


def build_tokenizer(kind: str, vocab_file: str | None, merge_file: str | None) -> Tokenizer:
    """The tokenizer of a kind of ``TOKENIZERS``, from the files it was trained into.

    Raises ConfigError for an unknown kind, and DataError for a file that is absent (None, too),
    superfluous, broken, or does not fit the other.
    """
    if kind not in TOKENIZERS:
        raise ConfigError(f"--tokenizer-type {kind} is unknown: choose one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind](vocab_file, merge_file)


def read_vocabulary(kind: str, vocab_file: str | None, merge_file: str | None) -> Vocabulary:
    """Size and end of document of a vocabulary, all its files checked. Raises as ``build_tokenizer`` does."""
    tokenizer = build_tokenizer(kind, vocab_file, merge_file)
    return Vocabulary(tokenizer.vocab_size, tokenizer.eod)
