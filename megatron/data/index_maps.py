"""Which tokens make sample j: an endless stream of shuffled epochs, cut into samples, shuffled again.

The stream is epoch 0 of the documents, then epoch 1, and so on, each in an order of its own. Sample j
starts at token ``j * seq_length`` of it and has ``seq_length + 1`` tokens, so neighbours share one.
The samples that start in epoch e are block e; each block is shuffled by itself. Nothing depends on how
many samples are asked for: a longer run sees the samples of a shorter one first, in the same order.

Three maps hold this, as in every program of the Megatron family:

    documents  [document epochs * documents]  documents in the order of the stream
    samples    [n + 1, 2]                     where sample j starts: position in ``documents``, token offset
    shuffle    [n]                            the sample that is the i-th to be trained on
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class SampleStream:
    """What the maps are made from.

    Attributes:
        lengths: tokens of each document, int64 [documents].
        seq_length: tokens of a sample, less one.
        wanted: samples asked for; the stream holds whole epochs, so more.
        seed: seed of both orders.
        salt: tells apart streams that share a seed.
    """

    lengths: np.ndarray
    seq_length: int
    wanted: int
    seed: int
    salt: int = 0

    @cached_property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.lengths.sum())

    @property
    def epochs(self) -> int:
        """Epochs whose blocks together hold the samples asked for."""
        return ((self.wanted - 1) * self.seq_length) // self.tokens + 1 if self.wanted else 0

    @property
    def samples(self) -> int:
        """Samples of all these blocks."""
        return self.first_sample(self.epochs)

    @property
    def document_epochs(self) -> int:
        """Epochs of documents that reach the last token of the last sample."""
        return -(-(self.samples * self.seq_length + 1) // self.tokens)

    def first_sample(self, epoch: int) -> int:
        """First sample that starts in ``epoch``."""
        return -(-epoch * self.tokens // self.seq_length)


@dataclass(frozen=True)
class IndexMaps:
    """The three maps of a stream; see the top of the file."""

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


def build_index_maps(stream: SampleStream) -> IndexMaps:
    """Compute the maps of a stream that has at least one token."""
    documents = np.concatenate([_document_order(stream, epoch) for epoch in range(stream.document_epochs)])
    blocks = [_block_order(stream, epoch) for epoch in range(stream.epochs)]
    return IndexMaps(
        documents=documents.astype(_fitting(len(stream.lengths), np.int32)),
        samples=sample_starts(stream.lengths[documents], stream.samples, stream.seq_length),
        shuffle=np.concatenate([np.empty(0, np.int64), *blocks]).astype(_fitting(stream.samples, np.uint32)),
    )


def sample_starts(lengths: np.ndarray, samples: int, seq_length: int) -> np.ndarray:
    """Where samples 0 to ``samples`` start in documents of these ``lengths``: [samples + 1, 2], see ``samples`` above.

    Rows are int32 where that holds them, else int64.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    # As many documents are behind a sample as end where it starts, or before. Counting them takes an eighth of the
    # time of a search for each sample.
    first_behind = -(-ends // seq_length)
    positions = np.cumsum(np.bincount(first_behind, minlength=samples + 1)[: samples + 1])
    widest = max(len(lengths), int(lengths.max()))
    table = np.empty((samples + 1, 2), _fitting(widest, np.int32))
    table[:, 0] = positions
    table[:, 1] = np.arange(samples + 1, dtype=np.int64) * seq_length - (ends - lengths)[positions]
    return table


def map_shapes(stream: SampleStream) -> dict[str, tuple[int, ...]]:
    """The shape of each of a stream's maps, without building them."""
    return {
        "documents": (stream.document_epochs * len(stream.lengths),),
        "samples": (stream.samples + 1, 2),
        "shuffle": (stream.samples,),
    }


def _document_order(stream: SampleStream, epoch: int) -> np.ndarray:
    """Order of the documents in one epoch."""
    return _random(stream, epoch, 0).permutation(len(stream.lengths))


def _block_order(stream: SampleStream, epoch: int) -> np.ndarray:
    """Order of the samples that start in one epoch."""
    first, end = stream.first_sample(epoch), stream.first_sample(epoch + 1)
    return first + _random(stream, epoch, 1).permutation(end - first)


def _random(stream: SampleStream, epoch: int, purpose: int) -> np.random.RandomState:
    """A generator of its own for every epoch and purpose.

    ``RandomState`` because NumPy has frozen its stream: a run resumed after an upgrade must go on in
    the same order, which the newer ``Generator`` does not promise.
    """
    seed_words = [stream.seed & 0xFFFFFFFF, stream.seed >> 32 & 0xFFFFFFFF]
    return np.random.RandomState([*seed_words, stream.salt, epoch, purpose])


def _fitting(bound: int, narrow: type[np.integer]) -> type[np.integer]:
    """``narrow`` if it holds all numbers up to ``bound``, else int64."""
    return narrow if bound <= np.iinfo(narrow).max else np.int64


@dataclass(frozen=True)
class SentenceMaps:
    """The two maps; see the top of the file."""

    runs: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class SentenceStream:
    """What the maps are made from.

    Attributes:
        sizes: tokens of each sentence, int32 [sentences].
        bounds: where each document begins, and behind them the number of sentences, int64 [documents + 1].
        room: tokens of both sentences of a sample.
        short_seq_prob: probability of a run that is made shorter.
        wanted: samples asked for; the stream holds whole epochs, so more.
        seed: seed of the targets and of the order.
        salt: tells apart streams that share a seed.
    """

    sizes: np.ndarray
    bounds: np.ndarray
    room: int
    short_seq_prob: float
    wanted: int
    seed: int
    salt: int = 0
    names: ClassVar[tuple[str, ...]] = ("runs", "order")
    """Of the maps."""

    def build(self) -> SentenceMaps:
        """The maps of a stream that has a document of two sentences."""
        runs = self._runs()
        epochs = -(-self.wanted // len(runs))
        orders = [_sentence_random(self, 1, epoch).permutation(len(runs)) for epoch in range(epochs)]
        return SentenceMaps(runs, np.concatenate([np.empty(0, np.int64), *orders]))

    def fit(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have shapes that this stream's can have."""
        runs, order = (maps[name] for name in self.names)
        n = len(runs)
        return n > 0 and runs.shape == (n, 3) and order.shape == (-(-self.wanted // n) * n,)

    def _runs(self) -> np.ndarray:
        """All runs, int64 [n, 3]; the next one of every document at a time."""
        tokens = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])  # before each sentence, and in all
        begin, stop = (side[np.diff(self.bounds) >= 2] for side in (self.bounds[:-1], self.bounds[1:]))
        random, found = _sentence_random(self, 0, 0), []
        while len(begin):
            is_short = random.random_sample(len(begin)) < self.short_seq_prob
            target = np.where(is_short, random.randint(2, self.room + 1, len(begin)), self.room)
            end = np.maximum(np.searchsorted(tokens, tokens[begin] + target), begin + 2)
            end = np.where(stop - end < 2, stop, end)
            found.append(np.stack([begin, end, target], axis=1))
            begin, stop = end[end < stop], stop[end < stop]
        runs = np.concatenate(found)
        return runs[runs[:, 0].argsort()]


def _sentence_random(stream: SentenceStream, purpose: int, epoch: int) -> np.random.RandomState:
    """A generator of its own for every purpose; ``RandomState``, since NumPy has frozen its stream."""
    return np.random.RandomState([stream.seed & 0xFFFFFFFF, stream.seed >> 32, stream.salt, purpose, epoch])
