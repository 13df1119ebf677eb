"""Words separated by whitespace, for corpora that are tokenized already, and numbers in place of words."""

from collections.abc import Sequence

import numpy as np

from megatron.common.errors import DataError
from megatron.tokenizer.base import EOD, UNK, ListTokenizer, check_known, read_vocab_json, require_files, require_tokens


class WhitespaceTokenizer(ListTokenizer):
    """One token a word, where words are what ``str.split`` finds; words outside the vocabulary are ``<unk>``.

    The vocabulary is a ``vocab.json`` with ``<unk>`` and ``<|endoftext|>``. A text that contains
    ``<|endoftext|>`` has an unknown word there, not an end of document. There are no merges; a file of them is not
    read, because command lines for Megatron-LM name one with any tokenizer.

    Attributes:
        unk: id of the words that are not in the vocabulary.
        bos: None.
    """

    bos: int | None = None

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

    def tokenize(self, text: str) -> list[int]:
        """The id of each word of ``text``."""
        return [self._ids.get(word, self.unk) for word in text.split()]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The words of ``ids`` with a blank between them. Raises DataError for an id outside the vocabulary."""
        check_known(ids, self.vocab_size)
        return " ".join(self._words[id] for id in ids)


class NullTokenizer(ListTokenizer):
    """Ids from 0 to ``vocab_size - 1``, written as numbers with blanks between them; the last four are special.

    For data whose text is not needed, such as mock data. (In Megatron-LM the end of a document is one more token than
    ``vocab_size``; here it is the last of them.)

    Attributes:
        eod, mask, cls, pad: the last id, and those before it; ``sep`` is ``eod``.
        unk, bos: None, for no text has an unknown token, and none begins it.
        continues: whether each token continues a word, bool [vocab_size]: none does.
    """

    unk: int | None = None
    bos: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod = self.sep = vocab_size - 1
        self.mask, self.cls, self.pad = (vocab_size - n for n in (2, 3, 4))
        self.continues = np.zeros(vocab_size, bool)

    def tokenize(self, text: str) -> list[int]:
        """The ids in ``text``. Raises DataError for a word that is no id, or that of the end of a document."""
        for word in text.split():
            if not word.isdecimal() or len(word) > 18 or int(word) >= self.eod:
                raise DataError(f"{word!r} is no token: NullTokenizer takes numbers from 0 to {self.eod - 1}")
        return [int(word) for word in text.split()]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """``ids`` as numbers. Raises DataError for an id outside the vocabulary."""
        check_known(ids, self.vocab_size)
        return " ".join(str(int(id)) for id in ids)
