"""BERT's WordPiece (Devlin et al., 2018), run by the Rust library ``tokenizers``."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron.errors import DataError
from megatron.tokenizer.gpt2_bpe import check_encodable
from megatron.tokenizer.vocabulary import check_known, read_text, require_files

PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""BERT's own tokens."""
CONTINUES = "##"
"""What the pieces of a word begin with, all but the first."""


class WordPieceTokenizer:
    """Words and punctuation, cut into the longest pieces that ``vocab.txt`` has, a piece a line.

    A word that cannot be put together is [UNK]. ``lower_case`` also takes accents away. A text that spells
    ``[MASK]`` is tokenized as a word between brackets.

    Attributes:
        pad, cls, sep, mask: ids of BERT's own tokens; ``eod`` is ``sep``.
        continues: whether each token goes on with a word, bool [vocab_size].
    """

    def __init__(self, vocab_file: str | None, merge_file: str | None = None, *, lower_case: bool):
        """Raises DataError if the vocabulary is absent or broken, or if merges are given."""
        if merge_file is not None:
            raise DataError(f"--merge-file {merge_file}: WordPiece has no merges; leave the flag out")
        require_files("WordPiece", {"--vocab-file": vocab_file})
        pieces = read_pieces(vocab_file)
        self.vocab_size = len(pieces)
        self.pad, self.cls, self.sep, self.mask = (pieces[token] for token in (PAD, CLS, SEP, MASK))
        self.eod = self.sep
        self.continues = np.array([piece.startswith(CONTINUES) and piece != CONTINUES for piece in pieces])
        self._encoder = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token=UNK, max_input_chars_per_word=100))
        self._encoder.normalizer = normalizer(lower_case)
        self._encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._encoder.decoder = decoders.WordPiece(prefix=CONTINUES)

    def tokenize(self, text: str) -> list[int]:
        """The ids of ``text``. Raises DataError for a text that UTF-8 cannot write."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, by all cores. Raises DataError for a text that UTF-8 cannot write."""
        try:
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            check_encodable(texts)
            raise
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The words of ``ids`` with blanks between them. Raises DataError for an id outside the vocabulary."""
        ids = [int(id) for id in ids]
        check_known(ids, self.vocab_size)
        return self._encoder.decode(ids, skip_special_tokens=False)


WordPieceLowerCase = partial(WordPieceTokenizer, lower_case=True)
WordPieceCase = partial(WordPieceTokenizer, lower_case=False)


def normalizer(lower_case: bool) -> normalizers.Normalizer:
    """What makes of a text what the pieces are pieces of."""
    return normalizers.BertNormalizer(lowercase=lower_case)


def read_pieces(path: str) -> dict[str, int]:
    """The piece -> id table of a ``vocab.txt``. Raises DataError if a line is empty, twice there, or one is lacking."""
    lines = [line.rstrip("\r") for line in read_text(path).removesuffix("\n").split("\n")]
    pieces: dict[str, int] = {}
    for number, piece in enumerate(lines, start=1):
        if not piece:
            raise DataError(f"{path}:{number}: empty; a WordPiece vocabulary has a token on each line")
        if piece in pieces:
            raise DataError(f"{path}:{number}: {piece!r} is there already, in line {pieces[piece] + 1}")
        pieces[piece] = number - 1
    if missing := [token for token in SPECIAL if token not in pieces]:
        raise DataError(
            f"{path}: the vocabulary lacks {', '.join(missing)}; is it BERT's vocab.txt, a token a line? "
            "(tools/train_tokenizer.py makes one)"
        )
    return pieces
