"""Word-based tokenizers: BERT's WordPiece (Devlin et al., 2018), run by the Rust library ``tokenizers``; a whitespace
tokenizer for corpora that are already tokenized; and a null tokenizer, for which token ids are the text."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.common.errors import DataError
from megatron.tokenizer.base import (
    EOD,
    UNK,
    RustTokenizer,
    Tokenizer,
    read_text,
    read_vocab_json,
    require_files,
    require_tokens,
)

PAD, _UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's special tokens."""
CONTINUES = "##"
"""Prefix of every piece of a word but the first."""


class WordPieceTokenizer(RustTokenizer):
    """WordPiece: cuts words and punctuation into the longest pieces of ``vocab.txt``, a file with one piece per line.

    A word that no sequence of pieces forms is [UNK]. ``lower_case`` also removes accents. ``[MASK]`` in a text is
    tokenized as a word in brackets. ``detokenize`` joins words with spaces.

    With ``extra_ids``, [BOS], [EOS] and ``extra_ids`` sentinels follow the vocabulary, as in Megatron-LM's T5.

    Attributes:
        pad, cls, sep, mask: ids of BERT's special tokens; ``eod`` is ``sep``, or [EOS] with ``extra_ids``.
        continues: whether each token continues a word, bool [vocab_size].
        extra: the tokens that follow the vocabulary.
    """

    def __init__(self, vocab_file: str | None, merge_file: str | None = None, *, lower_case: bool, extra_ids: int = 0):
        """Raises DataError if the vocabulary is absent or broken, or if merges are given."""
        if merge_file is not None:
            raise DataError(f"--merge-file {merge_file}: WordPiece has no merges; leave the flag out")
        (self.path,) = require_files("WordPiece", {"--vocab-file": vocab_file})
        pieces = read_pieces(self.path)
        encoder = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token=_UNKNOWN, max_input_chars_per_word=100))
        encoder.normalizer = normalizer(lower_case)
        encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        encoder.decoder = decoders.WordPiece(prefix=CONTINUES)
        self.extra = ["[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in range(extra_ids))] if extra_ids else []
        self._encoder, self.vocab_size = encoder, len(pieces) + len(self.extra)
        self.pad, self.cls, self.sep, self.mask = (pieces[token] for token in (PAD, CLS, SEP, MASK))
        self.eod, self.unk = self.sep, pieces[_UNKNOWN]
        names = [*pieces, *self.extra]
        self.continues = np.array([name.startswith(CONTINUES) and name != CONTINUES for name in names])
        if self.extra:
            self.bos, self.eod = len(pieces), len(pieces) + 1

    def _decode(self, ids: list[int]) -> str:
        if not self.extra:
            return super()._decode(ids)
        first = self.vocab_size - len(self.extra)
        texts = []
        for is_extra, group in groupby(ids, lambda id: id >= first):
            same_kind = list(group)
            texts += [self.extra[id - first] for id in same_kind] if is_extra else [super()._decode(same_kind)]
        return " ".join(texts)


WordPieceLowerCase = partial(WordPieceTokenizer, lower_case=True)
WordPieceCase = partial(WordPieceTokenizer, lower_case=False)


def normalizer(lower_case: bool) -> normalizers.Normalizer:
    """The normalization of texts before they are cut into pieces."""
    return normalizers.BertNormalizer(lowercase=lower_case)


def read_pieces(path: str) -> dict[str, int]:
    """The ids of a ``vocab.txt``, piece -> id. Raises DataError if a line is empty, repeated or missing."""
    lines = [line.rstrip("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    pieces: dict[str, int] = {}
    for number, piece in enumerate(lines, start=1):
        if not piece:
            raise DataError(f"{path}:{number}: empty; a WordPiece vocabulary has a token on each line")
        if piece in pieces:
            raise DataError(f"{path}:{number}: {piece!r} repeats line {pieces[piece] + 1}")
        pieces[piece] = number - 1
    check_special(path, pieces)
    return pieces


def check_special(path: str, pieces: Mapping[str, int]) -> None:
    """Raises DataError if the vocabulary in ``path`` lacks one of BERT's special tokens."""
    if missing := [token for token in SPECIAL if token not in pieces]:
        raise DataError(
            f"{path}: the vocabulary lacks {', '.join(missing)}; is it BERT's vocab.txt, a token a line? "
            "(tools/train_tokenizer.py makes one)"
        )


class WhitespaceTokenizer(Tokenizer):
    """One token per word, with words as of ``str.split``; words outside the vocabulary are ``<unk>``.

    The vocabulary is a ``vocab.json`` with ``<unk>`` and ``<|endoftext|>``. ``<|endoftext|>`` in a text is an unknown
    word, not the end of a document. ``merge_file`` is ignored, because command lines for Megatron-LM give
    ``--merge-file`` with any tokenizer.
    """

    unk: int

    def __init__(self, vocab_file: str | None, merge_file: str | None = None):
        """Raises DataError if the vocabulary is absent or broken."""
        path = require_files("WhitespaceTokenizer", {"--vocab-file": vocab_file})[0]
        vocabulary = read_vocab_json(path)
        require_tokens(path, vocabulary, (UNK, EOD))
        self.vocab_size = len(vocabulary)
        self.eod = vocabulary[EOD]
        self.unk = vocabulary[UNK]
        self._words = {id: word for word, id in vocabulary.items()}
        self._ids = {word: id for word, id in vocabulary.items() if word != EOD}

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(word, self.unk) for word in text.split()] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(self._words[id] for id in ids)


class NullTokenizer(Tokenizer):
    """A tokenizer without files: texts are ids from 0 to ``vocab_size - 1``, separated by spaces.

    For data whose text is not needed, such as mock data. The last four ids are special tokens. (In Megatron-LM the
    end-of-document token has the id ``vocab_size``; here ``vocab_size - 1``.)

    Attributes:
        eod, mask, cls, pad: the last four ids, from the last one backwards; ``sep`` is ``eod``.
        continues: whether each token continues a word, bool [vocab_size]: all False.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = self.sep = vocab_size - 1
        self.mask, self.cls, self.pad = (vocab_size - n for n in (2, 3, 4))
        self.continues = np.zeros(vocab_size, bool)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        for word in " ".join(texts).split():
            if not (word.isascii() and word.isdecimal()) or len(word) > 18 or int(word) >= self.eod:
                raise DataError(f"{word!r} is no token: NullTokenizer takes numbers from 0 to {self.eod - 1}")
        return [[int(word) for word in text.split()] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
