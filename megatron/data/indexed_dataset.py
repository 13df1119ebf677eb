"""Reads the indexed data sets of the Megatron family by memory map.

``PREFIX.bin`` holds the tokens of all sequences one after the other, without a header, and ``PREFIX.idx`` the bounds of
sequences and documents: see ``megatron.data.index_file``.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.common.reading import check_regular
from megatron.data.index_file import DTYPES, Index, Totals, check, read_index, starts_of
from megatron.data.indexed_dataset_builder import SequenceBuilder
from megatron.data.map_cache import CHECKED_ONCE, cached_numbers, digest
from megatron.data.mapped_file import map_file, prefetch


class Known(NamedTuple):
    """The result of an earlier check of a data set, of files with these sizes and modification times."""

    sizes_and_times: list[int]
    """Size in bytes and modification time in ns, of both files."""
    header: str
    """The header of the index, in hexadecimal."""
    dtype: str
    counts: tuple[int, int]
    """Number of sequences and of documents."""
    totals: Totals
    parts: list[tuple[int, int, int]]
    """Start, stop and number of tokens of some ranges of documents."""

    def is_of(self, sizes_and_times: list[int]) -> bool:
        """Whether files of these sizes and times, which have not changed, may have given this result."""
        (sequences, documents), (tokens, longest, empty, divided) = self.counts, self.totals
        return (
            self.sizes_and_times == sizes_and_times
            and self.dtype in _DTYPES
            and re.fullmatch("([0-9a-f]{2})*", self.header) is not None
            and tokens * np.dtype(self.dtype).itemsize == sizes_and_times[0]
            and 12 * sequences + 8 * documents <= sizes_and_times[2]
            and min(sequences, documents, longest, empty, divided) >= 0
            and longest <= tokens
            and all(0 <= start <= stop <= documents and 0 <= part <= tokens for start, stop, part in self.parts)
        )


_DTYPES = {dtype.str for dtype in DTYPES.values()}


class IndexedDataset:
    """Read access to the data set ``PREFIX.bin`` and ``PREFIX.idx``.

    Opening reads the entire index but no tokens. The index is checked completely, so that no later read is outside of
    ``PREFIX.bin``. A data set with an earlier check in ``known`` is not opened until it is read.

    Raises DataError if a file is missing, unreadable, of another format, damaged or truncated.

    Attributes:
        dtype: type of the tokens on disk.
        is_new: whether it was checked now, because ``known`` is absent or out of date.

    Args:
        cache: folder that keeps the check of a large index.
        known: the result of an earlier check.
    """

    def __init__(self, prefix: str | Path, *, cache: Path | None = None, known: Known | None = None) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = Path(f"{self.prefix}.bin"), Path(f"{self.prefix}.idx")
        with self._readable():
            self._sizes_and_times = self._stat()
            self.is_new = known is None or not known.is_of(self._sizes_and_times)
            checked = self._check(cache) if known is None or self.is_new else known
        self._known, self.dtype, self.totals = checked, np.dtype(checked.dtype), Totals(*checked.totals)
        self._num_sequences, self.num_documents = checked.counts
        self.num_tokens = self.totals.tokens
        self._tokens_of = {(start, stop): tokens for start, stop, tokens in checked.parts}

    def known(self) -> Known | None:
        """The result of the check, for other processes; None for a small index, which every process checks."""
        parts = [(*bounds, tokens) for bounds, tokens in self._tokens_of.items()]
        return self._known._replace(parts=parts) if self._is_large else None

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"cannot read {error.filename or self.prefix}: {error.strerror}") from error

    def _stat(self) -> list[int]:
        """Sizes and modification times of both files. Raises DataError if one is missing."""
        paths = (self.bin_path, self.idx_path)
        try:
            return [number for stat in map(os.stat, paths) for number in (stat.st_size, stat.st_mtime_ns)]
        except OSError:
            missing = " and ".join(str(path) for path in paths if not path.exists())
            if not missing:
                raise
            raise DataError(f"no data set at {self.prefix}: {missing} missing ({_suggestion(self.prefix)})") from None

    @property
    def _is_large(self) -> bool:
        return self._sizes_and_times[2] >= CHECKED_ONCE

    def _check(self, cache: Path | None) -> Known:
        """Check both files; the check of a large index is read from ``cache`` if it is there. Raises DataError."""
        index = self._index
        if cache is None or not self._is_large:
            totals = check(self.idx_path, index)
        else:
            name = f"{Path(self.prefix).name}_{digest(self._hash(index.header))}"
            count, find = len(Totals._fields), lambda: check(self.idx_path, index)
            totals = Totals(*cached_numbers(cache, name, "index", np.int64, count, find).tolist())
        check_regular(self.bin_path)  # also fails if it is not readable
        size, itemsize = self._sizes_and_times[0], index.dtype.itemsize
        if size != totals.tokens * itemsize and cache is not None:
            totals = check(self.idx_path, index)  # the cached numbers may be damaged
        if size != totals.tokens * itemsize:
            problem = "is truncated" if size < totals.tokens * itemsize else "does not belong to its index"
            raise DataError(
                f"{self.bin_path} {problem}: it has {size} bytes, its index says {totals.tokens} tokens of {itemsize} "
                f"bytes, {totals.tokens * itemsize} in all"
            )
        counts = len(index.sizes), len(index.doc_idx) - 1
        return Known(self._sizes_and_times, index.header.hex(), index.dtype.str, counts, totals, [])

    @cached_property
    def _index(self) -> Index:
        """The index, mapped on first use. Raises DataError if the file has changed since the start."""
        with self._readable():
            index, stat = read_index(self.idx_path), self.idx_path.stat()
        if [stat.st_size, stat.st_mtime_ns] != self._sizes_and_times[2:]:
            raise DataError(f"{self.idx_path} was replaced after this run had begun: start it again")
        return index

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, int32 [S]."""
        return self._index.sizes

    @cached_property
    def pointers(self) -> np.ndarray:
        """Byte offset of each sequence in ``PREFIX.bin``, int64 [S]."""
        return self._index.pointers

    @cached_property
    def doc_idx(self) -> np.ndarray:
        """0, then for each document the number of sequences up to its end, int64 [D]."""
        return self._index.doc_idx

    @property
    def modes(self) -> np.ndarray | None:
        """The mode of each sequence, 0 for text, int8 [S]; None unless it is a multimodal data set."""
        return self._index.modes

    def __len__(self) -> int:
        """Sequences in the data set."""
        return self._num_sequences

    def get(self, index: int) -> np.ndarray:
        """Tokens of sequence ``index``, without a copy."""
        return self.run(index, index + 1)

    def run(self, first: int, end: int) -> np.ndarray:
        """Tokens of the sequences ``first`` to ``end - 1``, without a copy."""
        start = self.sequence_start(first)
        return self._tokens[start : start + int(self.sizes[first:end].sum())]

    def sequence_start(self, index: int) -> int:
        """The first token of sequence ``index``, counted in the entire data set."""
        return int(self.pointers[index]) // self.dtype.itemsize

    @cached_property
    def _tokens(self) -> np.ndarray:
        """The tokens of all sequences, mapped on first use."""
        with self._readable():
            return map_file(self.bin_path).view(self.dtype)

    def document_start(self, document: int) -> int:
        """The first token of a document, counted in the entire data set; ``num_tokens`` for ``num_documents``."""
        sequence = self.doc_idx.item(document)
        return self.sequence_start(sequence) if sequence < len(self.sizes) else self.num_tokens

    def tokens_of(self, documents: range) -> int:
        """The number of tokens of consecutive documents."""
        bounds = documents.start, documents.stop
        if bounds not in self._tokens_of:
            self._tokens_of[bounds] = self.document_start(documents.stop) - self.document_start(documents.start)
        return self._tokens_of[bounds]

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """The number of tokens of each of ``documents``, int64 [n]."""
        if not self.totals.is_divided:
            return self.sizes[documents].astype(np.int64)
        sequences = (self.doc_idx[bounds] for bounds in (documents, documents + 1))
        begin, stop = (starts_of(self._index, bounds, self.num_tokens) for bounds in sequences)
        return stop - begin

    @cached_property
    def document_starts(self) -> np.ndarray:
        """The first token of each document, counted in the entire data set, and finally ``num_tokens``, int64 [D]."""
        return np.append(self.pointers // self.dtype.itemsize, self.num_tokens)[self.doc_idx]

    def span(self, start: int, length: int) -> np.ndarray:
        """Tokens ``start`` to ``start + length - 1`` of the entire data set, without a copy."""
        return prefetch(self._tokens[start : start + length])

    def content_hash(self) -> str:
        """A hash of the header, and of the sizes and modification times of both files; reads no tokens."""
        return self._hash(bytes.fromhex(self._known.header))

    def _hash(self, header: bytes) -> str:
        stats = [tuple(self._sizes_and_times[:2]), tuple(self._sizes_and_times[2:])]
        return hashlib.sha256(repr((stats, header)).encode()).hexdigest()


def _suggestion(prefix: str) -> str:
    """A suggestion for a prefix without a data set."""
    if prefix.endswith((".bin", ".idx")):
        return f"give the prefix without the ending: {prefix[:-4]}"
    path = Path(prefix)
    longer = sorted(path.parent.glob(f"{glob.escape(path.name)}_*.idx"))
    return f"did you mean {longer[0].with_suffix('')}?" if longer else "tools/preprocess_data.py makes one"


def make_builder(out_file: str, impl: str = "mmap", vocab_size: int | None = None) -> SequenceBuilder:
    """Megatron-LM's function for preprocessing scripts. ``impl`` is ignored: all data sets are read by memory map."""
    return SequenceBuilder(out_file, vocab_size)


def check_tokens(
    indexed: IndexedDataset, tokens: np.ndarray, place: str, vocab_size: int, offset: int = 0
) -> np.ndarray:
    """``tokens`` at ``offset`` of a ``place`` as int64. Raises DataError if one is not below ``vocab_size``."""
    tokens = tokens.astype(np.int64)
    if (wrong := (tokens < 0) | (tokens >= vocab_size)).any():
        at = int(wrong.argmax())
        raise DataError(
            f"{indexed.bin_path} holds token {tokens[at]} in {place} at offset {offset + at}, but the vocabulary ends "
            f"at {vocab_size - 1}: name the vocabulary that the data set was made with, or make the data set again"
        )
    return tokens


class DocumentLengths:
    """The number of tokens of each of ``documents``, computed on access: like an array, int64 [documents]."""

    def __init__(self, indexed: IndexedDataset, documents: range) -> None:
        self._indexed, self._documents = indexed, documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return self._indexed.lengths_of(numbers.astype(np.int64) + self._documents.start)

    def sum(self) -> int:
        return self._indexed.tokens_of(self._documents)

    def max(self) -> int:
        """Tokens of the longest document of the entire data set: an upper bound."""
        return self._indexed.totals.longest

    @property
    def empty(self) -> int:
        """Empty documents of the entire data set: an upper bound."""
        return self._indexed.totals.empty


class Span(NamedTuple):
    """A part of a document."""

    indexed: IndexedDataset
    document: int
    """Number in the data set, from 0."""
    start: int
    stop: int
    """Start and stop count tokens of the document; ``stop`` is exclusive."""

    def tokens(self) -> np.ndarray:
        """The tokens as they are stored, without a copy."""
        begin = self.indexed.document_start(self.document) + self.start
        return self.indexed.span(begin, self.stop - self.start)

    def sequences(self) -> range:
        """The sequences of the document (such as sentences) that overlap with the span, numbered from 0."""
        first, end = self.indexed.doc_idx[self.document : self.document + 2]
        ends = np.cumsum(self.indexed.sizes[first:end])
        return range(int(np.searchsorted(ends, self.start, "right")), int(np.searchsorted(ends, self.stop)) + 1)
