"""Samples for GPT-2: ``seq_length + 1`` consecutive tokens of shuffled documents, without padding.

The documents are an endless stream of epochs: epoch 0, then epoch 1, and so on, each shuffled by itself. Sample j
starts at token ``j * seq_length`` of it, so neighbors share one token. The samples that start in epoch e are block e;
each block is shuffled by itself. Nothing depends on how many samples are requested: a longer run sees the samples of a
shorter one first, in the same order.

Three maps hold this, as in every program of the Megatron family:

    documents  [positions]  documents in the order of the stream, up to the end of the last sample or a little later
    samples    [n + 1, 2]   where sample j starts: position in ``documents``, token offset
    shuffle    [n]          the sample that is the i-th to be trained on

They are built for an epoch at a time, so that neither memory nor the time to start grows with the number of iterations.
In the maps of an epoch, samples and positions count from its beginning.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np

from megatron.common.errors import DataError
from megatron.common.processes import at_once
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.indexed_dataset import DocumentLengths, Span, unknown_token
from megatron.data.map_cache import ROWS, Arrays, Form, Make, Recipe, cache_folder, cached_epoch, digest, is_recorded
from megatron.data.mapped_file import may_close
from megatron.data.splits import Source, SourceSamples, advice, seed_words, words_of


@dataclass(frozen=True)
class IndexMaps:
    """The three maps of an epoch; see the top of the file."""

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class SampleStream:
    """The endless stream of samples of some documents.

    Attributes:
        lengths: tokens of each document, int64 [documents]; an array, or what computes parts of one.
        seq_length: tokens of a sample, less one.
        seed: seed of both orders.
        salt: distinguishes streams that share a seed.
    """

    lengths: "np.ndarray | DocumentLengths"
    seq_length: int
    seed: int
    salt: int = 0

    @cached_property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return int(self.lengths.sum())

    def first_sample(self, epoch: int) -> int:
        """First sample that starts in ``epoch``."""
        return -(-epoch * self.tokens // self.seq_length)

    def epoch_of(self, sample: int) -> int:
        """The epoch in which a sample starts."""
        return sample * self.seq_length // self.tokens

    @cached_property
    def _tail(self) -> int:
        """Documents of the epoch in which the last sample of another ends that it can need."""
        empty = self.lengths.empty if isinstance(self.lengths, DocumentLengths) else np.sum(self.lengths == 0)
        return min(len(self.lengths), self.seq_length + 1 + int(empty))

    def recipe(self, epoch: int) -> Recipe:
        """How the maps of ``epoch`` are built."""
        first, end = self.first_sample(epoch), self.first_sample(epoch + 1)
        samples, documents, longest = end - first, len(self.lengths), int(self.lengths.max())
        positions = (self.epoch_of(end) - epoch) * documents + self._tail
        widest = _fitting(max(positions, longest), np.int32)
        forms = {
            "documents": Form(_fitting(documents, np.int32), (positions,), documents, covers=True),
            "samples": Form(widest, (samples + 1, 2), (positions, longest)),
            "shuffle": Form(_fitting(samples, np.uint32), (samples,), samples, covers=True),
        }
        return Recipe(forms, 4 * documents + 12 * samples, partial(self.build, epoch), partial(self._fits, epoch))

    def _fits(self, epoch: int, arrays: Arrays) -> bool:
        """Whether each sample starts ``seq_length`` tokens after the one before, within its document."""
        samples, starts = arrays["samples"], self._sample_starts(epoch, arrays["documents"])
        return all(np.array_equal(samples[first : first + len(rows)], rows) for first, rows in starts)

    def build(self, epoch: int, make: Make | None = None) -> Arrays:
        """Compute the maps of ``epoch``, in which a sample starts, in arrays by ``make`` or in memory.

        Large arrays by ``make``, which several processes can write, are computed by as many as there are cores.
        """
        forms = self.recipe(epoch).forms
        arrays = {key: make(key) if make else np.empty(form.shape, form.dtype) for key, form in forms.items()}
        documents, samples = arrays["documents"], arrays["samples"]
        # Up to the last token of the last sample, which is in a later epoch.
        orders = [documents[first : first + len(self.lengths)] for first in range(0, len(documents), len(self.lengths))]
        shuffles = [
            partial(self._shuffle, epoch + number, 0, len(self.lengths), order) for number, order in enumerate(orders)
        ]
        shuffles.append(partial(self._shuffle, epoch, 1, len(arrays["shuffle"]), arrays["shuffle"]))
        count = min(MOST_PROCESSES, len(os.sched_getaffinity(0))) if make and len(documents) > 4 * ROWS else 1
        sums = np.frombuffer(mmap.mmap(-1, 8 * (len(documents) // max(ROWS // count, 1) + 1)), np.int64)

        def write(number: int) -> None:
            for first, rows in self._sample_starts(epoch, documents, number, count, sums):
                samples[first : first + len(rows)] = rows

        for steps in (shuffles, [partial(write, number) for number in range(count)]):
            if count > 1:
                at_once(steps, "the index maps")
            else:
                for step in steps:
                    step()
        return arrays

    def _shuffle(self, epoch: int, purpose: int, count: int, order: np.ndarray) -> None:
        """Fill ``order`` with the first numbers below ``count``, shuffled by a generator for the epoch and purpose."""
        random = np.random.RandomState([*seed_words(self.seed), self.salt, epoch, purpose])
        numbers = np.arange(count, dtype=order.dtype)
        random.shuffle(numbers)  # as its permutation(count)
        # Pages of a file that are written in random order reach the disk again and again.
        order[:] = numbers[: len(order)]

    def _sample_starts(
        self, epoch: int, documents: np.ndarray, number: int = 0, count: int = 1, sums: np.ndarray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Where the samples of ``epoch`` start, int64 [n, 2], see ``samples`` above; and the number of the first.

        Process ``number`` of ``count`` has every ``count``-th block of documents. In ``sums``, memory of all of them
        that begins as zeros, is one more than the tokens of each block, once they are known.
        """
        first = self.first_sample(epoch)
        last = self.first_sample(epoch + 1) - first
        offset, rows = first * self.seq_length - epoch * self.tokens, max(ROWS // count, 1)
        begins = range(0, len(documents), rows)
        sums = np.zeros(len(begins), np.int64) if sums is None else sums
        for block in range(number, len(begins), count):
            begin = begins[block]
            lengths = self.lengths[documents[begin : begin + rows]]
            ends = np.cumsum(lengths, dtype=np.int64)
            sums[block] = ends[-1] + 1
            while not sums[:block].all():
                time.sleep(_WAIT_SECONDS)
            ends += (base := int(sums[:block].sum()) - block)
            starts = (-((offset - end) // self.seq_length) for end in (base, int(ends[-1])))
            sample, stop = (min(max(start, 0), last + 1) for start in starts)
            # The document of a sample is the number of documents that end at its start or before. Counting them takes
            # an eighth of the time of a search for each sample.
            after = np.clip(-((offset - ends) // self.seq_length), sample, stop) - sample
            positions = np.cumsum(np.bincount(after, minlength=stop - sample)[: stop - sample])
            tokens = np.arange(sample, stop, dtype=np.int64) * self.seq_length + offset
            yield sample, np.stack([begin + positions, tokens - (ends - lengths)[positions]], axis=1)
            if stop > last:
                sums[block + count :: count] = 1  # nobody waits for these
                return


MOST_PROCESSES = 8
"""That build the maps of an epoch."""
_WAIT_SECONDS = 0.001


def _fitting(bound: int, narrow: type[np.integer]) -> type[np.integer]:
    """``narrow`` if it holds all numbers up to ``bound``, else int64."""
    return narrow if bound <= np.iinfo(narrow).max else np.int64


class GPT2Dataset(SourceSamples):
    """Samples of ``seq_length + 1`` tokens.

    Attributes:
        stream: the stream of samples of the documents, which are numbered from 0.
        maps: returns the maps of an epoch.
    """

    def __init__(
        self, data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
    ) -> None:
        indexed, documents = source.indexed, source.documents
        lengths = DocumentLengths(indexed, documents)
        self.stream = stream = SampleStream(lengths, data.seq_length, seed, SPLITS.index(name))
        epochs = stream.epoch_of(samples - 1) + 1
        super().__init__(source, stream.first_sample(epochs), epochs)
        self._vocab_size = vocab_size
        origin = digest((indexed.content_hash(), documents, name, seed, data.seq_length, stream.recipe(0).forms))
        folder = cache_folder(data, indexed.prefix)
        cache_name = f"{Path(indexed.prefix).name}_{name}_{data.seq_length}sl_{seed}s_{origin}_epoch"

        @lru_cache(maxsize=1)  # samples are read in order; each map is one of few that a process may have
        def maps(epoch: int) -> IndexMaps:
            return IndexMaps(**cached_epoch(folder, f"{cache_name}{epoch}", stream.recipe(epoch), epoch))

        self.maps = maps
        self.stored_as = f"{cache_name}0"
        self._is_stored = partial(is_recorded, folder, self.stored_as, stream.recipe(0))
        may_close(self)

    def close(self) -> None:
        """Unmap the maps until they are read again: a blend of thousands has more than a process may map."""
        self.maps.cache_clear()

    def prepare(self) -> bool:
        # Those of a blend of thousands are opened when they are read: a process may map 65,530 files.
        if not self._is_stored():
            self.maps(0)
            if not self._is_stored():
                return False
            self.maps.cache_clear()
        return True

    @staticmethod
    def problem(data: DataConfig, name: str, source: Source) -> str | None:
        """An error message for a source that does not hold a single sample of the split ``name``, else None."""
        _, indexed, documents = source
        tokens = indexed.tokens_of(documents)
        if tokens > data.seq_length:
            return None
        which = f"documents {documents.start} to {documents.stop - 1}" if documents else "no document"
        return (
            f"{words_of(data, name, source)} ({which} of {indexed.num_documents}: {tokens} tokens) holds no sample of "
            f"{data.seq_length}+1 tokens: {advice(data, name, source, 'a smaller --seq-length')}"
        )

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        """Tokens of some samples, int64 [n, seq_length + 1]."""
        span, begin_of, before = self.indexed.span, self.indexed.document_start, self.documents.start
        parts = [
            span(begin_of(before + document) + start, stop - start)
            for index in indices
            for document, start, stop in self._parts(index)
        ]
        rows = np.concatenate(parts, dtype=np.int64).reshape(len(indices), -1)
        if rows.view(np.uint64).max() >= self._vocab_size:  # a negative one is a very large one there
            raise self._unknown_token([span for index in indices for span in self.spans(index)])
        return rows

    def spans(self, index: int) -> list[Span]:
        """The parts of documents that make up the ``index``-th sample, in order."""
        first = self.documents.start
        return [Span(self.indexed, first + document, *bounds) for document, *bounds in self._parts(index)]

    def _parts(self, index: int) -> list[tuple[int, int, int]]:
        """Document, counted from the first in use, start and stop of each part of the ``index``-th sample."""
        epoch = self.stream.epoch_of(index)
        maps, begin_of, before = self.maps(epoch), self.indexed.document_start, self.documents.start
        sample = maps.shuffle.item(index - self.stream.first_sample(epoch))
        (first, begin), (last, end) = maps.samples[sample : sample + 2].tolist()
        parts = []
        for position in range(first, last):
            document = maps.documents.item(position)
            parts.append((document, begin, begin_of(before + document + 1) - begin_of(before + document)))
            begin = 0
        # The last token of a sample is the first of the next one.
        parts.append((maps.documents.item(last), begin, end + 1))
        return parts

    def _unknown_token(self, spans: list[Span]) -> DataError:
        """The error for the first token that is not in the vocabulary."""
        for span in spans:
            tokens = span.tokens().astype(np.int64)
            wrong = (tokens < 0) | (tokens >= self._vocab_size)
            if wrong.any():
                break
        at = int(wrong.argmax())
        place = f"document {span.document} at offset {span.start + at}"
        return unknown_token(self.indexed, tokens[at], place, self._vocab_size)
