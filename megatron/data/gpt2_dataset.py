"""Samples for GPT-2: runs of ``seq_length + 1`` tokens out of shuffled documents, without padding."""

from typing import NamedTuple

import numpy as np

from megatron.data.index_maps import IndexMaps
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError


class Span(NamedTuple):
    """A piece of a document."""

    indexed: IndexedDataset
    document: int
    """Number in the data set, from 0."""
    start: int
    stop: int
    """Tokens of the document in front of it, and up to its end."""

    def tokens(self) -> np.ndarray:
        """Its tokens, int64."""
        begin = int(self.indexed.document_starts[self.document]) + self.start
        return self.indexed.span(begin, self.stop - self.start).astype(np.int64)


class GPT2Dataset:
    """Samples of some documents of a data set, in the order of training.

    Args:
        indexed: the data set.
        documents: the documents to use.
        maps: order of samples over these documents, numbered from 0.
        vocab_size: tokens at or above it are an error.
    """

    def __init__(self, indexed: IndexedDataset, documents: range, maps: IndexMaps, *, vocab_size: int) -> None:
        self.indexed, self.documents, self.maps = indexed, documents, maps
        self._starts = indexed.document_starts[documents.start : documents.stop + 1]
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """Samples in the data set: whole epochs, at least as many as were asked for."""
        return len(self.maps.shuffle)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of the ``index``-th sample to train on, int64 [seq_length + 1].

        Raises:
            DataError: a token is not in the vocabulary.
        """
        return np.concatenate([self._tokens(span) for span in self.spans(index)])

    def spans(self, index: int) -> list[Span]:
        """The pieces of documents that make the ``index``-th sample, one behind the other."""
        sample = int(self.maps.shuffle[index])
        (first, begin), (last, end) = self.maps.samples[sample : sample + 2].tolist()
        spans = []
        for position in range(first, last + 1):
            document = int(self.maps.documents[position])
            # The last token of a sample is the first of the next one.
            stop = end + 1 if position == last else int(self._starts[document + 1] - self._starts[document])
            start = begin if position == first else 0
            spans.append(Span(self.indexed, self.documents.start + document, start, stop))
        return spans

    def _tokens(self, span: Span) -> np.ndarray:
        """Tokens of a piece, checked, int64."""
        tokens = span.tokens()
        wrong = (tokens < 0) | (tokens >= self._vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise DataError(
                f"{self.indexed.bin_path} holds token {tokens[at]} in document {span.document} at "
                f"offset {span.start + at}, but the vocabulary ends at {self._vocab_size - 1}: name the vocabulary "
                "that the data set was made with, or make the data set again"
            )
        return tokens
