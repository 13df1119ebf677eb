"""Samples for GPT-2: ``seq_length + 1`` consecutive tokens of shuffled documents, without padding."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.common.errors import DataError
from megatron.config import DataConfig
from megatron.config.data import SPLITS
from megatron.data.index_maps import IndexMaps, SampleStream, WindowedMaps
from megatron.data.indexed_dataset import IndexedDataset, Span, check_mapped
from megatron.data.map_cache import Arrays, cache_folder, cached_window, digest
from megatron.data.splits import SPLIT_NAMES, Source


class GPT2Dataset:
    """Samples of some documents of a data set, in the order of training.

    Args:
        indexed: the data set.
        documents: the documents to use.
        maps: order of samples over these documents, numbered from 0.
        vocab_size: tokens at or above it are an error.
    """

    def __init__(self, indexed: IndexedDataset, documents: range, maps: WindowedMaps, *, vocab_size: int) -> None:
        self.indexed, self.documents, self.maps = indexed, documents, maps
        self._starts = indexed.document_starts[documents.start : documents.stop + 1]
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """Samples in the data set: whole epochs, at least as many as were requested."""
        return len(self.maps)

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of the ``index``-th sample to train on, int64 [seq_length + 1]. Raises DataError as ``take`` does."""
        return self.take([index])[0]

    def take(self, indices: Sequence[int]) -> np.ndarray:
        """Tokens of some samples, int64 [n, seq_length + 1]. Raises DataError if one is not in the vocabulary.

        It is also raised if a file of the data set or its index maps has been truncated.
        """
        located = [self.maps.locate(index) for index in indices]
        for maps in {id(maps): maps for maps, _ in located}.values():
            check_mapped(maps.documents, maps.samples, maps.shuffle)
        span, begin_of = self.indexed.span, self._starts.item
        parts = [
            span(begin_of(document) + start, stop - start)
            for maps, at in located
            for document, start, stop in self._parts(maps, at)
        ]
        rows = np.concatenate(parts, dtype=np.int64).reshape(len(indices), -1)
        if rows.view(np.uint64).max() >= self._vocab_size:  # a negative one is a very large one there
            raise self._unknown_token([span for index in indices for span in self.spans(index)])
        return rows

    def spans(self, index: int) -> list[Span]:
        """The parts of documents that make up the ``index``-th sample, in order."""
        first, parts = self.documents.start, self._parts(*self.maps.locate(index))
        return [Span(self.indexed, first + document, *bounds) for document, *bounds in parts]

    def _parts(self, maps: IndexMaps, at: int) -> list[tuple[int, int, int]]:
        """Document, counted from the first in use, start and stop of each part of the ``at``-th sample of a window."""
        begin_of = self._starts.item
        sample = maps.shuffle.item(at)
        (first, begin), (last, end) = maps.samples[sample : sample + 2].tolist()
        parts = []
        for position in range(first, last):
            document = maps.documents.item(position)
            parts.append((document, begin, begin_of(document + 1) - begin_of(document)))
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
        return DataError(
            f"{self.indexed.bin_path} holds token {tokens[at]} in document {span.document} at "
            f"offset {span.start + at}, but the vocabulary ends at {self._vocab_size - 1}: name the vocabulary "
            "that the data set was made with, or make the data set again"
        )


def gpt2_error(data: DataConfig, name: str, source: Source) -> str | None:
    """An error message for a source that does not hold a single sample of the split ``name``, else None."""
    _, indexed, documents = source
    starts = indexed.document_starts
    tokens = int(starts[documents.stop] - starts[documents.start])
    if tokens > data.seq_length:
        return None
    which = f"documents {documents.start} to {documents.stop - 1}" if documents else "no document"
    cut, advice = (f' by --split "{data.split}"', " or another --split") if data.is_split else ("", "")
    return (
        f"the {SPLIT_NAMES[name]} split of {indexed.prefix}{cut} ({which} of {indexed.num_documents}: {tokens} "
        f"tokens) holds no sample of {data.seq_length}+1 tokens: use more text{',' if advice else ' or'} a smaller "
        f"--seq-length{advice}"
    )


def gpt2_samples(
    data: DataConfig, name: str, source: Source, samples: int, *, vocab_size: int, seed: int
) -> GPT2Dataset:
    """At least ``samples`` samples of one source of the split ``name``."""
    indexed, documents = source.indexed, source.documents
    stream = SampleStream(
        lengths=np.diff(indexed.document_starts[documents.start : documents.stop + 1]),
        seq_length=data.seq_length,
        requested=samples,
        seed=seed,
        salt=SPLITS.index(name),
    )
    folder, prefix, content = cache_folder(data, indexed.prefix), Path(indexed.prefix).name, indexed.content_hash()

    def load(window: SampleStream) -> Arrays:
        later = (window.first_epoch,) if window.first_epoch else ()
        origin = (content, documents, name, seed, data.seq_length, window.samples, *later)
        cache_name = f"{prefix}_{name}_{window.samples}ns_{data.seq_length}sl_{seed}s_{digest(origin)}"
        return cached_window(folder, cache_name, window, first_epoch=window.first_epoch, epochs=stream.window_epochs)

    return GPT2Dataset(indexed, documents, WindowedMaps(stream, load), vocab_size=vocab_size)
