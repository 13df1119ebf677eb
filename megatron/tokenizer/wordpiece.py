"""BERT's WordPiece (Devlin et al., 2018), run by the Rust library ``tokenizers``."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.common.errors import DataError
from megatron.tokenizer.base import RustTokenizer, check_known, read_text, vocabulary_file

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
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
        path = vocabulary_file("WordPiece", vocab_file, merge_file)
        pieces = read_pieces(path)
        encoder = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token=UNK, max_input_chars_per_word=100))
        encoder.normalizer = normalizer(lower_case)
        encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        encoder.decoder = decoders.WordPiece(prefix=CONTINUES)
        self.extra = ["[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in range(extra_ids))] if extra_ids else []
        super().__init__(encoder, len(pieces) + len(self.extra))
        self.pad, self.cls, self.sep, self.mask = (pieces[token] for token in (PAD, CLS, SEP, MASK))
        self.eod, self.unk = self.sep, pieces[UNK]
        names = [*pieces, *self.extra]
        self.continues = np.array([name.startswith(CONTINUES) and name != CONTINUES for name in names])
        if self.extra:
            self.bos, self.eod = len(pieces), len(pieces) + 1

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of ``ids``. Raises DataError for an id outside the vocabulary."""
        if not self.extra:
            return super().detokenize(ids)
        check_known(ids, self.vocab_size)
        first = self.vocab_size - len(self.extra)
        texts = []
        for is_extra, group in groupby(map(int, ids), lambda id: id >= first):
            run = list(group)
            texts += [self.extra[id - first] for id in run] if is_extra else [super().detokenize(run)]
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
