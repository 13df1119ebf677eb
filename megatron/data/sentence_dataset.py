"""Base of the data sets of BERT and T5: shuffled runs of sentences of documents, and random runs of words in them.

runs   [n, 3]  for each run of sentences: first sentence, end (exclusive), and maximum number of tokens
order  [n]     the i-th run to train on in an epoch; each epoch is shuffled separately
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.indexed_dataset import Span, check_tokens
from megatron.data.map_cache import Form, Recipe, cache_folder, cached, cached_epoch, digest
from megatron.data.splits import Source, SourceSamples, advice, describe_split, seed_words


@dataclass(frozen=True)
class SentenceStream:
    """The endless stream of runs of sentences of some documents.

    Attributes:
        sizes: tokens of each sentence, int32 [sentences].
        bounds: first sentence of each document, and finally the number of sentences, int64 [documents + 1].
        max_tokens: maximum number of tokens in a sample.
        short_seq_prob: probability of a random smaller maximum for a sample.
        seed: seed of the lengths and of the order.
        salt: distinguishes streams that share a seed.
        fewest: minimum number of sentences in a sample; for BERT one for each span.
    """

    sizes: np.ndarray
    bounds: np.ndarray
    max_tokens: int
    short_seq_prob: float
    seed: int
    salt: int = 0
    fewest: int = 2

    def order(self, runs: int, epoch: int) -> np.ndarray:
        """The order of the ``runs`` runs in ``epoch``, int64 [runs]."""
        return self._random(1, epoch).permutation(runs)

    def runs(self) -> np.ndarray:
        """All runs, int64 [n, 3]. Each step of the loop computes the next run of all documents at once."""
        tokens = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])  # before each sentence, and the total
        begin, stop = (side[np.diff(self.bounds) >= self.fewest] for side in (self.bounds[:-1], self.bounds[1:]))
        random, spans = self._random(0, 0), []
        while len(begin):
            is_short = random.random_sample(len(begin)) < self.short_seq_prob
            target = np.where(is_short, random.randint(_LEAST_TARGET, self.max_tokens + 1, len(begin)), self.max_tokens)
            end = np.maximum(np.searchsorted(tokens, tokens[begin] + target), begin + self.fewest)
            end = np.where(stop - end < self.fewest, stop, end)
            spans.append(np.stack([begin, end, target], axis=1))
            begin, stop = end[end < stop], stop[end < stop]
        pairs = np.concatenate(spans)
        return pairs[pairs[:, 0].argsort()]

    def fits(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether the stored runs are those of the stream: any others may be valid, but leave out sentences."""
        return np.array_equal(arrays["runs"], self.runs())

    def _random(self, purpose: int, epoch: int) -> np.random.RandomState:
        """A separate generator for each purpose and epoch."""
        return np.random.RandomState([*seed_words(self.seed), self.salt, purpose, epoch])


_LEAST_TARGET = 2
"""The smallest random maximum of tokens in a sample."""


class Run(NamedTuple):
    """Consecutive sentences of one document."""

    first: int
    """Number of the first sentence in the data set."""
    end: int
    """Number of the sentence after the last one."""
    target: int
    """Maximum number of tokens that a sample takes from the run."""


class SentenceDataset(SourceSamples):
    """Samples of a data set whose sequences are sentences, of at most ``max_tokens`` tokens.

    Attributes:
        runs: the runs of ``SentenceStream``; sentence 0 is the first sentence of the split.
        order: returns the order of the runs in an epoch.
    """

    fewest = 1
    """Minimum number of sentences in a sample."""
    lacks = "sentence:"
    """What a source without a sample lacks, and the beginning of the advice, for messages."""

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, max_tokens: int, seed: int
    ) -> None:
        indexed, documents, fewest = source.indexed, source.documents, self.fewest
        bounds = indexed.doc_idx[documents.start : documents.stop + 1]
        sizes = indexed.sizes[bounds[0] : bounds[-1]]
        salt = SPLITS.index(name)
        stream = SentenceStream(sizes, bounds - bounds[0], max_tokens, data.short_seq_prob, seed, salt, fewest)
        origin = (indexed.content_hash(), documents, name, seed, max_tokens, data.short_seq_prob, fewest)
        cache_name = f"{Path(indexed.prefix).name}_{name}_{data.seq_length}sl_{seed}s_{digest(origin)}"
        folder = cache_folder(data, indexed.prefix)
        least = 24 * int(np.count_nonzero(np.diff(bounds) >= fewest))  # one run for each document that is long enough
        form = Form(np.int64, (-1, 3), (len(sizes), len(sizes) + 1, max_tokens + 1))
        recipe = Recipe({"runs": form}, least, lambda _: {"runs": stream.runs()}, stream.fits)
        self.runs = runs = cached(folder, cache_name, recipe)["runs"]
        epochs = -(-samples // len(runs))
        super().__init__(source, epochs * len(runs), epochs)

        @lru_cache(maxsize=2)
        def order(epoch: int) -> np.ndarray:
            form = Form(np.int64, (len(runs),), len(runs), covers=True)
            recipe = Recipe({"order": form}, 8 * len(runs), lambda _: {"order": stream.order(len(runs), epoch)})
            return cached_epoch(folder, f"{cache_name}_epoch{epoch}", recipe, epoch)["order"]

        self.order, self.map_files = order, f"{folder / cache_name}_*"
        order(0)

    @classmethod
    def problem(cls, data: DataConfig, name: str, source: Source) -> str | None:
        """An error message for a source that does not hold a single sample of the split ``name``, else None."""
        _, indexed, documents = source
        if (np.diff(indexed.doc_idx[documents.start : documents.stop + 1]) >= cls.fewest).any():
            return None
        split = f"{describe_split(data, name, source)} ({len(documents)} of {indexed.num_documents} documents)"
        return f"{split} holds no {cls.lacks} {advice(data, name, source)}"

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        return np.stack([self._sample(self._run(index), index) for index in indices])

    @abstractmethod
    def _sample(self, run: Run, index: int) -> np.ndarray:
        """Sample ``index``, made from ``run``."""

    def spans(self, index: int) -> list[Span]:
        """The parts of a document in sample ``index``, in the order of the sample."""
        run = self._run(index)
        document = int(np.searchsorted(self.indexed.doc_idx, run.first, "right")) - 1
        offset = self.indexed.sequence_start(run.first) - int(self.indexed.document_starts[document])
        return [
            Span(self.indexed, document, offset + part.start, offset + part.stop) for part in self._parts(run, index)
        ]

    @abstractmethod
    def _parts(self, run: Run, index: int) -> Sequence[range]:
        """The ranges of tokens of ``run`` in sample ``index``, counted from the first token of the run."""

    def _run(self, index: int) -> Run:
        """The run of sample ``index``."""
        epoch, at = divmod(index, len(self.runs))
        first, end, target = map(int, self.runs[self.order(epoch)[at]])
        before = int(self.indexed.doc_idx[self.documents.start])
        return Run(before + first, before + end, target)

    def _tokens(self, run: Run, vocab_size: int) -> np.ndarray:
        """Tokens of the sentences of ``run``, int64. Raises DataError if one is not below ``vocab_size``."""
        tokens = self.indexed.run(run.first, run.end)
        return check_tokens(self.indexed, tokens, f"sentences {run.first} to {run.end - 1}", vocab_size)


def words_of(tokens: np.ndarray, separators: Collection[int], continues: np.ndarray) -> list[list[int]]:
    """The positions of each word of ``tokens``; ``separators`` are special tokens, which belong to no word."""
    words: list[list[int]] = []
    for position, token in enumerate(tokens.tolist()):
        if token in separators:
            continue
        if words and continues[token]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


def random_runs(
    words: Sequence[Sequence[int]],
    most: Callable[[int], float],
    length: Callable[[], int],
    random: np.random.RandomState,
) -> list[list[int]]:
    """Draw runs of ``words``, as the positions of their tokens, in order, as Megatron-LM draws what it masks.

    Runs start at words in random order, and have ``length()`` words, shortened so that n + 1 runs have at most
    ``most(n)`` tokens; a run that overlaps an earlier one is dropped.
    """
    taken, runs = set[int](), list[list[int]]()
    for first in random.permutation(len(words)).tolist():
        limit = most(len(runs))
        if len(taken) >= limit:
            break
        number, run = length(), list[int]()
        while number and len(taken) + len(run := list(chain(*words[first : first + number]))) > limit:
            number -= 1
        if number and taken.isdisjoint(run):
            taken.update(run)
            runs.append(run)
    return sorted(runs)
