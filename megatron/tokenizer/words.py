"""Tokenizers of words: BERT's WordPiece (Devlin et al., 2018), run by the Rust library ``tokenizers``; whole words
separated by whitespace, for corpora that are tokenized already; and numbers in place of words."""

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
"""BERT's own tokens."""
CONTINUES = "##"
"""Prefix of every piece of a word but the first."""


class WordPieceTokenizer(RustTokenizer):
    """Words and punctuation, cut into the longest pieces in ``vocab.txt``, which has a piece a line.

    A word that cannot be put together is [UNK]. ``lower_case`` also removes accents. A text that contains ``[MASK]``
    is tokenized as a word between brackets. ``detokenize`` returns words with blanks between them.

    With ``extra_ids`` there are [BOS], [EOS] and as many sentinels after the vocabulary, as Megatron-LM has for T5.

    Attributes:
        pad, cls, sep, mask: ids of BERT's own tokens; ``eod`` is ``sep``, or [EOS].
        continues: whether each token continues a word, bool [vocab_size].
        extra: the tokens after the vocabulary.
    """

    def __init__(self, vocab_file: str | None, merge_file: str | None = None, *, lower_case: bool, extra_ids: int = 0):
        """Raises DataError if the vocabulary is absent or broken, or if merges are given."""
        if merge_file is not None:
            raise DataError(f"--merge-file {merge_file}: WordPiece has no merges; leave the flag out")
        (path,) = require_files("WordPiece", {"--vocab-file": vocab_file})
        pieces = read_pieces(path)
        encoder = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token=_UNKNOWN, max_input_chars_per_word=100))
        encoder.normalizer = normalizer(lower_case)
        encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        encoder.decoder = decoders.WordPiece(prefix=CONTINUES)
        self.extra = ["[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in range(extra_ids))] if extra_ids else []
        super().__init__(encoder, len(pieces) + len(self.extra))
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
            run = list(group)
            texts += [self.extra[id - first] for id in run] if is_extra else [super()._decode(run)]
        return " ".join(texts)


WordPieceLowerCase = partial(WordPieceTokenizer, lower_case=True)
WordPieceCase = partial(WordPieceTokenizer, lower_case=False)


def normalizer(lower_case: bool) -> normalizers.Normalizer:
    """The normalization of texts before they are cut into pieces."""
    return normalizers.BertNormalizer(lowercase=lower_case)


def read_pieces(path: str) -> dict[str, int]:
    """The piece -> id table of a ``vocab.txt``. Raises DataError if a line is empty, repeated or missing."""
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
    """Raises DataError if the vocabulary in ``path`` lacks one of BERT's own tokens."""
    if missing := [token for token in SPECIAL if token not in pieces]:
        raise DataError(
            f"{path}: the vocabulary lacks {', '.join(missing)}; is it BERT's vocab.txt, a token a line? "
            "(tools/train_tokenizer.py makes one)"
        )


class WhitespaceTokenizer(Tokenizer):
    """One token a word, where words are what ``str.split`` finds; words outside the vocabulary are ``<unk>``.

    The vocabulary is a ``vocab.json`` with ``<unk>`` and ``<|endoftext|>``. A text that contains
    ``<|endoftext|>`` has an unknown word there, not an end of document. There are no merges; a file of them is not
    read, because command lines for Megatron-LM name one with any tokenizer.

    Attributes:
        unk: id of the words that are not in the vocabulary.
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
    """Ids from 0 to ``vocab_size - 1``, written as numbers with blanks between them; the last four are special.

    For data whose text is not needed, such as mock data. (In Megatron-LM the end of a document is one more token than
    ``vocab_size``; here it is the last of them.)

    Attributes:
        eod, mask, cls, pad: the last id, and those before it; ``sep`` is ``eod``.
        continues: whether each token continues a word, bool [vocab_size]: none does.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = self.sep = vocab_size - 1
        self.mask, self.cls, self.pad = (vocab_size - n for n in (2, 3, 4))
        self.continues = np.zeros(vocab_size, bool)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        for word in " ".join(texts).split():
            if not word.isdecimal() or len(word) > 18 or int(word) >= self.eod:
                raise DataError(f"{word!r} is no token: NullTokenizer takes numbers from 0 to {self.eod - 1}")
        return [[int(word) for word in text.split()] for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
