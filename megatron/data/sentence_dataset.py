"""Samples of runs of sentences, for BERT and T5: which sentences are in which sample, and in which order.

Two maps hold it:

    spans  [n, 3]         first sentence, the one after the last, and tokens at most, of each run of sentences
    order  [epochs * n]   the run that is the i-th to be trained on; each epoch is shuffled by itself

As in ``megatron.data.index_maps``, the order is built for a window of some epochs at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.index_maps import window_epochs
from megatron.data.indexed_dataset import IndexedDataset, Span, check_mapped
from megatron.data.map_cache import cache_folder, cached, cached_window, digest
from megatron.data.splits import Source


@dataclass(frozen=True)
class SentenceMaps:
    """The two maps, of which ``order`` is that of the first window; see the top of the file."""

    spans: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class SentenceStream:
    """The stream of pairs of spans of some documents.

    Attributes:
        sizes: tokens of each sentence, int32 [sentences].
        bounds: first sentence of each document, and finally the number of sentences, int64 [documents + 1].
        max_tokens: tokens of both spans of a sample, at most.
        short_seq_prob: probability that a sample is shorter.
        requested: samples needed; the stream holds whole epochs, so more.
        seed: seed of the lengths and of the order.
        salt: distinguishes streams that share a seed.
        fewest: sentences of a sample, at least; of BERT one for each span.
    """

    sizes: np.ndarray
    bounds: np.ndarray
    max_tokens: int
    short_seq_prob: float
    requested: int
    seed: int
    salt: int = 0
    fewest: int = 2
    names: ClassVar[tuple[str, ...]] = ("runs", "order")
    """Names of the maps on disk."""

    @property
    def nbytes(self) -> int:
        """Bytes of the maps that ``build`` returns, at least: of a pair for each document that has one."""
        return 32 * int(np.count_nonzero(np.diff(self.bounds) >= self.fewest))

    def build(self) -> dict[str, np.ndarray]:
        """Compute the maps of a stream with a document of enough sentences; the order is that of the first window."""
        spans = self._spans()
        return {"runs": spans, "order": self.order(len(spans), self.window(len(spans), 0))}

    def fits(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have shapes that those of this stream can have."""
        spans, order = (maps[name] for name in self.names)
        n = len(spans)
        return n > 0 and spans.shape == (n, 3) and order.shape == (len(self.window(n, 0)) * n,)

    def window(self, pairs: int, number: int) -> range:
        """The epochs of the ``number``-th window, from 0, of a stream of that many pairs of spans."""
        epochs, size = -(-self.requested // pairs), window_epochs(pairs)
        return range(epochs)[number * size : (number + 1) * size]

    def order(self, pairs: int, epochs: range) -> np.ndarray:
        """The order of the pairs in each of ``epochs``, int64 [epochs * pairs]."""
        orders = [self._random(1, epoch).permutation(pairs) for epoch in epochs]
        return np.concatenate([np.empty(0, np.int64), *orders])

    def _spans(self) -> np.ndarray:
        """All pairs of spans, int64 [n, 3]; computed for all documents at once, the next pair of each at a time."""
        tokens = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])  # before each sentence, and in all
        begin, stop = (side[np.diff(self.bounds) >= self.fewest] for side in (self.bounds[:-1], self.bounds[1:]))
        random, spans = self._random(0, 0), []
        while len(begin):
            is_short = random.random_sample(len(begin)) < self.short_seq_prob
            target = np.where(is_short, random.randint(2, self.max_tokens + 1, len(begin)), self.max_tokens)
            end = np.maximum(np.searchsorted(tokens, tokens[begin] + target), begin + self.fewest)
            end = np.where(stop - end < self.fewest, stop, end)
            spans.append(np.stack([begin, end, target], axis=1))
            begin, stop = end[end < stop], stop[end < stop]
        pairs = np.concatenate(spans)
        return pairs[pairs[:, 0].argsort()]

    def _random(self, purpose: int, epoch: int) -> np.random.RandomState:
        """A generator of its own for every purpose; ``RandomState``, since NumPy has frozen its stream."""
        return np.random.RandomState([self.seed & 0xFFFFFFFF, self.seed >> 32, self.salt, purpose, epoch])


@dataclass(frozen=True)
class OrderWindow:
    """The order of the pairs in a later window of a stream."""

    stream: SentenceStream
    pairs: int
    epochs: range
    names: ClassVar[tuple[str, ...]] = ("order",)

    @property
    def nbytes(self) -> int:
        """Bytes of the map."""
        return 8 * self.pairs * len(self.epochs)

    def build(self) -> dict[str, np.ndarray]:
        """Compute the map."""
        return {"order": self.stream.order(self.pairs, self.epochs)}

    def fits(self, maps: Mapping[str, np.ndarray]) -> bool:
        """Whether ``maps`` have the shape of that which ``build`` returns."""
        return maps["order"].shape == (self.pairs * len(self.epochs),)


class Run(NamedTuple):
    """Consecutive sentences of one document."""

    first: int
    """Number of its first sentence in the data set."""
    end: int
    """Number of the one after the last."""
    target: int
    """Tokens of them that a sample has, at most."""


class SentenceDataset(ABC):
    """Samples of some documents of a data set of sentences, in the order of training.

    Attributes:
        indexed: the data set; its sequences are sentences.
        documents: the documents to use.
        maps: which sentences make up which sample; sentence 0 is the first of these documents.

    Args:
        later_order: the order of the runs in the window with a number from 1.
        samples: samples that are needed.
    """

    def __init__(
        self, source: Source, maps: SentenceMaps, later_order: Callable[[int], np.ndarray], samples: int
    ) -> None:
        self.indexed, self.documents, self.maps = source.indexed, source.documents, maps
        self._later_order = lru_cache(maxsize=2)(later_order)
        runs = len(maps.spans)
        self._samples, self._window = -(-samples // runs) * runs, window_epochs(runs) * runs

    def __len__(self) -> int:
        """Samples in the data set: whole epochs, at least as many as were requested."""
        return self._samples

    @abstractmethod
    def __getitem__(self, index: int) -> np.ndarray:
        """The ``index``-th sample to train on, int64. Raises DataError if a token is not in the vocabulary."""

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Some samples, int64 [n, ...]. Raises DataError as each does."""
        return np.stack([self[index] for index in indices])

    def spans(self, index: int) -> list[Span]:
        """The parts of a document that make up the ``index``-th sample, in the order in which it has them."""
        run = self._run(index)
        document = int(np.searchsorted(self.indexed.doc_idx, run.first, "right")) - 1
        offset = self.indexed.sequence_start(run.first) - int(self.indexed.document_starts[document])
        return [
            Span(self.indexed, document, offset + part.start, offset + part.stop) for part in self._parts(run, index)
        ]

    def order(self, number: int) -> np.ndarray:
        """The order of the runs in the window with that number, int64."""
        return self._later_order(number) if number else self.maps.order

    @abstractmethod
    def _parts(self, run: Run, index: int) -> Sequence[range]:
        """The tokens of ``run`` that the ``index``-th sample has, counted from the first of the run."""

    def _run(self, index: int) -> Run:
        """The sentences of the ``index``-th sample. Raises IndexError if there is none."""
        if not 0 <= index < self._samples:
            raise IndexError(index)
        number, at = divmod(index, self._window)
        order = self.order(number)
        check_mapped(self.maps.spans, order)
        first, end, target = map(int, self.maps.spans[order[at]])
        before = int(self.indexed.doc_idx[self.documents.start])
        return Run(before + first, before + end, target)


def read_sentences(indexed: IndexedDataset, run: Run, vocab_size: int) -> np.ndarray:
    """Tokens of consecutive sentences, int64. Raises DataError if one is not in a vocabulary of that size."""
    tokens = indexed.run(run.first, run.end).astype(np.int64)
    if (wrong := (tokens < 0) | (tokens >= vocab_size)).any():
        raise DataError(
            f"{indexed.bin_path} holds token {tokens[wrong.argmax()]} in sentences {run.first} to {run.end - 1}, but "
            f"the vocabulary ends at {vocab_size - 1}: name the vocabulary that the data set was made with, or make "
            "the data set again"
        )
    return tokens


def sentence_maps(
    data: DataConfig, name: str, source: Source, samples: int, *, max_tokens: int, fewest: int, seed: int
) -> tuple[SentenceMaps, Callable[[int], np.ndarray]]:
    """The maps of a source of the split ``name``, built or read from the cache.

    The maps, and a function of the number of a window that returns the order in it.
    """
    indexed, documents = source.indexed, source.documents
    salt, bounds = SPLITS.index(name), indexed.doc_idx[documents.start : documents.stop + 1]
    stream = SentenceStream(
        sizes=indexed.sizes[bounds[0] : bounds[-1]],
        bounds=bounds - bounds[0],
        max_tokens=max_tokens,
        short_seq_prob=data.short_seq_prob,
        requested=samples,
        seed=seed,
        salt=salt,
        fewest=fewest,
    )
    origin: tuple = (indexed.content_hash(), documents, name, seed, stream.max_tokens, data.short_seq_prob, samples)
    origin += (fewest,) if fewest != 2 else ()
    cache_name = f"{Path(indexed.prefix).name}_{name}_{samples}np_{data.seq_length}sl_{seed}s_{digest(origin)}"
    folder = cache_folder(data, indexed.prefix)
    maps = cached(folder, cache_name, stream)
    pairs = len(maps["runs"])

    def later_order(number: int) -> np.ndarray:
        epochs = stream.window(pairs, number)
        window, name = OrderWindow(stream, pairs, epochs), f"{cache_name}_from{epochs.start}"
        return cached_window(folder, name, window, first_epoch=epochs.start, epochs=window_epochs(pairs))["order"]

    return SentenceMaps(spans=maps["runs"], order=maps["order"]), later_order
