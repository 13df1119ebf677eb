"""Samples for GPT-2: ``seq_length + 1`` consecutive tokens of shuffled documents, without padding.

The documents form an endless stream of epochs 0, 1, ..., each of which is shuffled separately. Sample j starts at token
``j * seq_length`` of the stream, so consecutive samples share one token. Samples that start in an epoch are shuffled
within it. The order does not depend on the number of requested samples: a longer run reads the samples of a shorter run
first, in the same order.

Three index maps store the order, as in other programs of the Megatron family:

    documents  [positions]  documents in the order of the stream, up to the end of the last sample or a little later
    samples    [n + 1, 2]   where sample j starts: position in ``documents``, token offset
    shuffle    [n]          the sample that is the i-th to be trained on

They are built for one epoch at a time, so that memory and start-up time do not grow with the number of iterations.
Samples and positions in the maps of an epoch count from the beginning of that epoch.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path

import numpy as np

from megatron.common.processes import run_in_processes
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.indexed_dataset import DocumentLengths, Span, check_tokens
from megatron.data.map_cache import ROWS, Arrays, Form, Make, Recipe, cache_folder, cached_epoch, digest, is_recorded
from megatron.data.mapped_file import register_closable
from megatron.data.splits import Source, SourceSamples, advice, describe_split, seed_words


@dataclass(frozen=True)
class IndexMaps:
    """The three index maps of an epoch; see the module docstring."""

    documents: np.ndarray
    samples: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class SampleStream:
    """The endless stream of samples of some documents.

    Attributes:
        lengths: tokens of each document, int64 [documents].
        seq_length: tokens of a sample, minus one.
        seed: seed of the order of documents and of samples.
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
        """The maximum number of documents of a following epoch in which the last sample of an epoch may end."""
        empty = self.lengths.empty if isinstance(self.lengths, DocumentLengths) else np.sum(self.lengths == 0)
        return min(len(self.lengths), self.seq_length + 1 + int(empty))

    def recipe(self, epoch: int) -> Recipe:
        """The recipe from which the cache builds and checks the maps of ``epoch``."""
        first, end = self.first_sample(epoch), self.first_sample(epoch + 1)
        samples, documents, longest = end - first, len(self.lengths), int(self.lengths.max())
        positions = (self.epoch_of(end) - epoch) * documents + self._tail
        widest = _smallest_dtype(max(positions, longest), np.int32)
        forms = {
            "documents": Form(_smallest_dtype(documents, np.int32), (positions,), documents, covers=True),
            "samples": Form(widest, (samples + 1, 2), (positions, longest)),
            "shuffle": Form(_smallest_dtype(samples, np.uint32), (samples,), samples, covers=True),
        }
        return Recipe(forms, 4 * documents + 12 * samples, partial(self.build, epoch), partial(self._fits, epoch))

    def _fits(self, epoch: int, arrays: Arrays) -> bool:
        """Whether stored maps are consistent: each sample starts ``seq_length`` tokens after the previous one."""
        samples, starts = arrays["samples"], self._sample_starts(epoch, arrays["documents"])
        return all(np.array_equal(samples[first : first + len(rows)], rows) for first, rows in starts)

    def build(self, epoch: int, make: Make | None = None) -> Arrays:
        """Compute the maps of ``epoch``, in which at least one sample starts.

        The arrays are allocated by ``make``, or in this process's memory without it. Large arrays of ``make``, which is
        shared memory, are computed by a process per core, up to ``MAX_PROCESSES``.
        """
        forms = self.recipe(epoch).forms
        arrays = {key: make(key) if make else np.empty(form.shape, form.dtype) for key, form in forms.items()}
        documents, samples = arrays["documents"], arrays["samples"]
        # One order for each epoch up to the one in which the last sample ends.
        orders = [documents[first : first + len(self.lengths)] for first in range(0, len(documents), len(self.lengths))]
        shuffles = [
            partial(self._shuffle, epoch + number, 0, len(self.lengths), order) for number, order in enumerate(orders)
        ]
        shuffles.append(partial(self._shuffle, epoch, 1, len(arrays["shuffle"]), arrays["shuffle"]))
        count = min(MAX_PROCESSES, len(os.sched_getaffinity(0))) if make and len(documents) > 4 * ROWS else 1
        sums = np.frombuffer(mmap.mmap(-1, 8 * (len(documents) // max(ROWS // count, 1) + 1)), np.int64)

        def write(number: int) -> None:
            for first, rows in self._sample_starts(epoch, documents, number, count, sums):
                samples[first : first + len(rows)] = rows

        for steps in (shuffles, [partial(write, number) for number in range(count)]):
            if count > 1:
                run_in_processes(steps, "the index maps")
            else:
                for step in steps:
                    step()
        return arrays

    def _shuffle(self, epoch: int, purpose: int, count: int, order: np.ndarray) -> None:
        """Fill ``order`` with the first numbers below ``count``, shuffled by a generator for the epoch and purpose."""
        random = np.random.RandomState([*seed_words(self.seed), self.salt, epoch, purpose])
        numbers = np.arange(count, dtype=order.dtype)
        random.shuffle(numbers)  # the same order as random.permutation(count)
        # Shuffled in memory: random writes to a mapped file would write its pages to disk many times.
        order[:] = numbers[: len(order)]

    def _sample_starts(
        self, epoch: int, documents: np.ndarray, number: int = 0, count: int = 1, sums: np.ndarray | None = None
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of the map ``samples`` of ``epoch``: the number of their first row, and rows int64 [n, 2].

        Process ``number`` of ``count`` computes every ``count``-th block of documents. ``sums``, in shared memory, is
        zero for each block until its number of tokens is known, and then that number plus one.
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
            # A sample starts in document i if i documents end at or before its start. Counting these ends takes an
            # eighth of the time of a binary search for each sample.
            after = np.clip(-((offset - ends) // self.seq_length), sample, stop) - sample
            positions = np.cumsum(np.bincount(after, minlength=stop - sample)[: stop - sample])
            tokens = np.arange(sample, stop, dtype=np.int64) * self.seq_length + offset
            yield sample, np.stack([begin + positions, tokens - (ends - lengths)[positions]], axis=1)
            if stop > last:
                sums[block + count :: count] = 1  # no process waits for these blocks
                return


MAX_PROCESSES = 8
"""Maximum number of processes that build the maps of an epoch."""
_WAIT_SECONDS = 0.001


def _smallest_dtype(bound: int, narrow: type[np.integer]) -> type[np.integer]:
    """``narrow`` if it holds all numbers up to ``bound``, else int64."""
    return narrow if bound <= np.iinfo(narrow).max else np.int64


class GPT2Dataset(SourceSamples):
    """Samples for GPT-2 of ``seq_length + 1`` tokens.

    Attributes:
        stream: the stream of samples; its documents are numbered from the first one of the split.
        maps: returns the index maps of an epoch.
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

        @lru_cache(maxsize=1)  # samples are read in order, and a process may map only a limited number of files
        def maps(epoch: int) -> IndexMaps:
            return IndexMaps(**cached_epoch(folder, f"{cache_name}{epoch}", stream.recipe(epoch), epoch))

        self.maps = maps
        self.stored_as, self.map_files = f"{cache_name}0", f"{folder / cache_name}*"
        self._is_stored = partial(is_recorded, folder, self.stored_as, stream.recipe(0))
        register_closable(self)

    def close(self) -> None:
        """Unmap the index maps until they are read again: a blend of thousands has more than a process may map."""
        self.maps.cache_clear()

    def prepare(self) -> bool:
        # Stored maps are mapped when they are read: a process may map 65,530 files, and a blend may have thousands.
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
            f"{describe_split(data, name, source)} ({which} of {indexed.num_documents}: {tokens} tokens) holds no "
            f"sample of {data.seq_length}+1 tokens: {advice(data, name, source, 'a smaller --seq-length')}"
        )

    def _read(self, indices: Sequence[int]) -> np.ndarray:
        """Tokens of the samples ``indices``, int64 [n, seq_length + 1]."""
        spans = [span for index in indices for span in self.spans(index)]
        rows = np.concatenate([span.tokens() for span in spans], dtype=np.int64)
        rows = rows.reshape(len(indices), self.stream.seq_length + 1)
        if rows.view(np.uint64).max() >= self._vocab_size:  # a negative id is very large as unsigned
            for span in spans:
                check_tokens(self.indexed, span.tokens(), f"document {span.document}", self._vocab_size, span.start)
        return rows

    def spans(self, index: int) -> list[Span]:
        """The parts of documents in sample ``index``, in order."""
        epoch, indexed, before = self.stream.epoch_of(index), self.indexed, self.documents.start
        maps, begin_of = self.maps(epoch), indexed.document_start
        sample = maps.shuffle.item(index - self.stream.first_sample(epoch))
        (first, begin), (last, end) = maps.samples[sample : sample + 2].tolist()
        spans = []
        for position in range(first, last):
            document = before + maps.documents.item(position)
            spans.append(Span(indexed, document, begin, begin_of(document + 1) - begin_of(document)))
            begin = 0
        # The last token of a sample is the first of the next one.
        spans.append(Span(indexed, before + maps.documents.item(last), begin, end + 1))
        return spans
