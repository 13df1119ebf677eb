"""The order of samples: an endless stream of shuffled epochs, cut into samples, which are shuffled again.

The stream is epoch 0 of the documents, then epoch 1, and so on, each in its own order. Sample j
starts at token ``j * seq_length`` of it and has ``seq_length + 1`` tokens, so neighbors share one.
The samples that start in epoch e are block e; each block is shuffled by itself. Nothing depends on how
many samples are requested: a longer run sees the samples of a shorter one first, in the same order.

Three maps hold this, as in every program of the Megatron family:

    documents  [document epochs * documents]  documents in the order of the stream
    samples    [n + 1, 2]                     where sample j starts: position in ``documents``, token offset
    shuffle    [n]                            the sample that is the i-th to be trained on

They are not built for the whole run but for a window of whole epochs at a time, so that neither memory nor the time
to start grows with the number of iterations. In the maps of a window, samples and positions count from its beginning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np

WINDOW = 1 << 20
"""Entries of the maps of a window, documents and samples together, unless a single epoch has more."""


def window_epochs(entries: int) -> int:
    """Epochs of a window if each has that many ``entries``."""
    return max(1, WINDOW // entries)


@dataclass(frozen=True)
class IndexMaps:
    """The three maps of a window of a stream; see the top of the file."""

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class SampleStream:
    """The stream of samples of some documents, or a window of it.

    Attributes:
        lengths: tokens of each document, int64 [documents].
        seq_length: tokens of a sample, less one.
        requested: samples needed, counted from the first of the stream; the stream holds whole epochs, so more.
        seed: seed of both orders.
        salt: distinguishes streams that share a seed.
        first_epoch: the epoch with which the window begins.
    """

    lengths: np.ndarray
    seq_length: int
    requested: int
    seed: int
    salt: int = 0
    first_epoch: int = 0
    names: ClassVar[tuple[str, ...]] = ("documents", "samples", "shuffle")
    """Names of the maps."""

    @cached_property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.lengths.sum())

    @property
    def epochs(self) -> int:
        """Epochs, counted from the first of the stream, whose blocks together hold the requested samples."""
        return ((self.requested - 1) * self.seq_length) // self.tokens + 1 if self.requested else 0

    @property
    def samples(self) -> int:
        """Samples of all these blocks."""
        return self.first_sample(self.epochs)

    @property
    def document_epochs(self) -> int:
        """Epochs of documents up to the last token of the last sample."""
        return -(-(self.samples * self.seq_length + 1) // self.tokens)

    def first_sample(self, epoch: int) -> int:
        """First sample that starts in ``epoch``."""
        return -(-epoch * self.tokens // self.seq_length)

    def epoch_of(self, sample: int) -> int:
        """The epoch in which a sample starts."""
        return sample * self.seq_length // self.tokens

    @cached_property
    def window_epochs(self) -> int:
        """Epochs of each window but the last, which may have fewer."""
        return window_epochs(len(self.lengths) + self.tokens // self.seq_length + 1)

    def window(self, number: int) -> "SampleStream":
        """The ``number``-th window of the stream, from 0."""
        first = number * self.window_epochs
        end = min(first + self.window_epochs, self.epochs)
        return replace(self, requested=self.first_sample(end), first_epoch=first)

    @property
    def nbytes(self) -> int:
        """Bytes of the maps that ``build`` returns, at least."""
        documents, samples = self._shape
        return 4 * documents + 12 * samples

    def build(self) -> dict[str, np.ndarray]:
        """Compute the maps of a window that has at least one token."""
        documents = np.concatenate(
            [self._document_order(epoch) for epoch in range(self.first_epoch, self.document_epochs)]
        )
        first = self.first_sample(self.first_epoch)
        samples = self.samples - first
        offset = first * self.seq_length - self.first_epoch * self.tokens
        blocks = [self._block_order(epoch) - first for epoch in range(self.first_epoch, self.epochs)]
        return {
            "documents": documents.astype(_fitting(len(self.lengths), np.int32)),
            "samples": sample_starts(self.lengths[documents], samples, self.seq_length, offset),
            "shuffle": np.concatenate([np.empty(0, np.int64), *blocks]).astype(_fitting(samples, np.uint32)),
        }

    def fits(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have the shapes of those that ``build`` returns."""
        documents, samples = self._shape
        return tuple(maps[name].shape for name in self.names) == ((documents,), (samples + 1, 2), (samples,))

    @property
    def _shape(self) -> tuple[int, int]:
        """Entries of the maps of documents and of samples."""
        epochs = self.document_epochs - self.first_epoch
        return epochs * len(self.lengths), self.samples - self.first_sample(self.first_epoch)

    def _document_order(self, epoch: int) -> np.ndarray:
        """Order of the documents in one epoch."""
        return self._random(epoch, 0).permutation(len(self.lengths))

    def _block_order(self, epoch: int) -> np.ndarray:
        """Order of the samples that start in one epoch."""
        first, end = self.first_sample(epoch), self.first_sample(epoch + 1)
        return first + self._random(epoch, 1).permutation(end - first)

    def _random(self, epoch: int, purpose: int) -> np.random.RandomState:
        """A generator of its own for every epoch and purpose.

        ``RandomState`` because NumPy has frozen its stream: a run resumed after an upgrade must continue in
        the same order, which the newer ``Generator`` does not promise.
        """
        seed_words = [self.seed & 0xFFFFFFFF, self.seed >> 32 & 0xFFFFFFFF]
        return np.random.RandomState([*seed_words, self.salt, epoch, purpose])


class WindowedMaps:
    """The maps of a stream, window by window. The last two windows that were read stay open.

    Args:
        load: returns the maps that a window's ``build`` does.
    """

    def __init__(self, stream: SampleStream, load: Callable[[SampleStream], Mapping[str, np.ndarray]]) -> None:
        self.stream = stream
        self._samples = stream.samples
        self.window = lru_cache(maxsize=2)(lambda number: IndexMaps(**load(stream.window(number))))
        """The maps of the ``number``-th window."""
        self.window(0)

    def __len__(self) -> int:
        """Samples of the stream: whole epochs, at least as many as were requested."""
        return self._samples

    def locate(self, index: int) -> tuple[IndexMaps, int]:
        """The maps of the window with the ``index``-th sample to train on, and its index there.

        Raises IndexError as ``window_of``.
        """
        number = self.window_of(index)
        return self.window(number), index - self.stream.first_sample(number * self.stream.window_epochs)

    def window_of(self, index: int) -> int:
        """The number of that window. Raises IndexError if there is no such sample."""
        if not 0 <= index < self._samples:
            raise IndexError(index)
        return self.stream.epoch_of(index) // self.stream.window_epochs


def sample_starts(lengths: np.ndarray, samples: int, seq_length: int, offset: int = 0) -> np.ndarray:
    """Where samples 0 to ``samples`` start in documents of these ``lengths``: [samples + 1, 2], see ``samples`` above.

    Sample 0 starts at token ``offset``. Rows are int32 if that holds them, else int64.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    # The document of a sample is the number of documents that end at its start or before. Counting them takes an
    # eighth of the time of a search for each sample.
    first_after = np.maximum(-((offset - ends) // seq_length), 0)
    positions = np.cumsum(np.bincount(first_after, minlength=samples + 1)[: samples + 1])
    widest = max(len(lengths), int(lengths.max()))
    table = np.empty((samples + 1, 2), _fitting(widest, np.int32))
    table[:, 0] = positions
    table[:, 1] = np.arange(samples + 1, dtype=np.int64) * seq_length + offset - (ends - lengths)[positions]
    return table


def _fitting(bound: int, narrow: type[np.integer]) -> type[np.integer]:
    """``narrow`` if it holds all numbers up to ``bound``, else int64."""
    return narrow if bound <= np.iinfo(narrow).max else np.int64


def rank_sample_indices(first: int, global_batch_size: int, data_rank: int, data_size: int) -> range:
    """The share of data-parallel rank ``data_rank`` of ``data_size`` in the global batch that begins at ``first``."""
    share = global_batch_size // data_size
    return range(first + data_rank * share, first + (data_rank + 1) * share)


def sample_at(index: int, skipped: Sequence[range]) -> int:
    """The ``index``-th sample, from 0, of those that are not ``skipped``; the ranges are in order."""
    for samples in skipped:
        if samples.start > index:
            break
        index += len(samples)
    return index


def with_skipped(skipped: Sequence[range], samples: range) -> tuple[range, ...]:
    """``skipped`` and ``samples``, in order and without overlap. ``samples`` covers whole ranges or none of them."""
    others = [other for other in skipped if other.start not in samples]
    return tuple(sorted([*others, samples], key=lambda span: span.start))
