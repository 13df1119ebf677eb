"""Words separated by whitespace, for corpora that are tokenized already."""

from collections.abc import Sequence

from megatron.tokenizer.base import EOD, UNK, ListTokenizer, check_known, read_vocab_json, require_files, require_tokens


class WhitespaceTokenizer(ListTokenizer):
    """One token a word, where words are what ``str.split`` finds; words outside the vocabulary are ``<unk>``.

    The vocabulary is a ``vocab.json`` with ``<unk>`` and ``<|endoftext|>``. A text that contains
    ``<|endoftext|>`` has an unknown word there, not an end of document. There are no merges; a file of them is not
    read, because command lines for Megatron-LM name one whatever the tokenizer.

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
