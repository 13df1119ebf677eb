"""The indexed data set of the Megatron family (MMIDIDX), read by memory map.

``PREFIX.bin`` holds the tokens of all sequences one after the other, without a header. ``PREFIX.idx``,
little-endian and packed, with S sequences and D - 1 documents:

    offset     type       content
    0          9 bytes    magic "MMIDIDX", two zero bytes
    9          u64        version, 1
    17         u8         dtype code of the tokens
    18         u64        S
    26         u64        D
    34         i32[S]     sizes: tokens of each sequence
    34 + 4S    i64[S]     pointers: byte offset of each sequence in PREFIX.bin
    34 + 12S   i64[D]     doc_idx: 0, then for each document the number of sequences up to its end
    ...        i8[S]      modes, 0 of text; only multimodal data sets have them

Older lazy and cached data sets have the same ``PREFIX.bin``, and an index that ``_read_legacy_index`` describes.
"""

import errno
import glob
import hashlib
import os
import stat
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.common.reading import check_regular, regular
from megatron.data.map_cache import ROWS, SMALL, Form, Make, Recipe, cached, digest
from megatron.data.mapped_file import content_of, read_whole

if TYPE_CHECKING:
    from megatron.data.indexed_dataset_builder import SequenceBuilder

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
LEGACY_HEADER = struct.Struct("<8s6Q")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}


class Known(NamedTuple):
    """What was found of a data set whose files had these sizes and times, and was right."""

    sizes_and_times: list[int]
    """Of both files, in bytes and ns."""
    header: str
    """As hexadecimal numbers."""
    dtype: str
    counts: list[int]
    """Sequences and documents."""
    checked: list[int]
    """What ``_check_index`` returns."""
    parts: list[list[int]]
    """Of some ranges of documents the first, the end, and how many tokens they have."""


class IndexedDataset:
    """Read access to the data set ``PREFIX.bin`` and ``PREFIX.idx``.

    Opening costs a pass over the index and none over the tokens. The index is checked completely, so that nothing
    read later can lie outside of ``PREFIX.bin``. Of a data set that is ``known`` nothing is opened until it is read.

    Attributes:
        dtype: type of the tokens on disk.
        num_documents: documents in the data set.
        is_new: whether it was not known.

    Raises:
        DataError: a file is missing, unreadable, of another format, damaged or truncated.
    """

    def __init__(self, prefix: str | Path, *, cache: Path | None = None, known: Known | None = None) -> None:
        self.prefix = str(prefix)
        self.bin_path = Path(f"{self.prefix}.bin")
        self.idx_path = Path(f"{self.prefix}.idx")
        self._bin_stat, self._idx_stat = _stat_files(self.prefix, self.bin_path, self.idx_path)
        stats = self._bin_stat, self._idx_stat
        self._sizes_and_times = [number for stat in stats for number in (stat.st_size, stat.st_mtime_ns)]
        self._tokens_of: dict[tuple[int, int], int] = {}
        self.is_new = known is None or known.sizes_and_times != self._sizes_and_times
        if known is not None and not self.is_new:
            self._header, self.dtype = bytes.fromhex(known.header), np.dtype(known.dtype)
            self._num_sequences, self.num_documents = known.counts
            self.num_tokens, self.longest_document, self.empty_documents, self._is_divided = known.checked
            self._tokens_of = {(start, stop): tokens for start, stop, tokens in known.parts}
            return
        self.dtype, self.sizes, self.pointers, self.doc_idx = self._index[0]
        self._num_sequences, self.num_documents = len(self.sizes), len(self.doc_idx) - 1
        try:
            self.num_tokens, self.longest_document, self.empty_documents, self._is_divided = self._checked(cache)
            check_regular(self.bin_path)  # and that it may be read
            _check_bin_size(self.bin_path, self._bin_stat.st_size, self.num_tokens, self.dtype)
        except OSError as error:
            raise self._unreadable(error) from error

    @cached_property
    def _index(self) -> "tuple[_Index, np.ndarray | None]":
        """The index and modes, mapped when they are read first. DataError if they have changed since the start."""
        try:
            with open(self.idx_path, "rb", opener=regular) as file:
                header, stat = file.read(LEGACY_HEADER.size), os.fstat(file.fileno())
            if [stat.st_size, stat.st_mtime_ns] != self._sizes_and_times[2:]:
                raise DataError(f"{self.idx_path} was replaced after this run had begun: start it again")
            self._header = header[: HEADER.size]
            read = _read_legacy_index if header.startswith(LEGACY_MAGIC) else _read_index
            return read(self.idx_path, header, stat.st_size)
        except OSError as error:
            raise self._unreadable(error) from error

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each sequence, int32 [S]."""
        return self._index[0][1]

    @cached_property
    def pointers(self) -> np.ndarray:
        """Byte offset of each sequence in ``PREFIX.bin``, int64 [S]."""
        return self._index[0][2]

    @cached_property
    def doc_idx(self) -> np.ndarray:
        """Sequences up to the end of each document, after a leading 0, int64 [D]."""
        return self._index[0][3]

    @property
    def modes(self) -> np.ndarray | None:
        """What each sequence is, 0 for text, int8 [S]; None unless it is a multimodal data set."""
        return self._index[1]

    def known(self) -> Known | None:
        """What another process need not find again; None of a small one, which is always checked."""
        if self._idx_stat.st_size < SMALL:
            return None
        checked = [self.num_tokens, self.longest_document, self.empty_documents, int(self._is_divided)]
        parts = [[*bounds, tokens] for bounds, tokens in self._tokens_of.items()]
        counts = [self._num_sequences, self.num_documents]
        return Known(self._sizes_and_times, self._header.hex(), self.dtype.str, counts, checked, parts)

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
        """Where sequence ``index`` begins in the tokens of the whole data set."""
        return int(self.pointers[index]) // self.dtype.itemsize

    @cached_property
    def _tokens(self) -> np.ndarray:
        """The tokens of all sequences, mapped when the first is read."""
        try:
            return content_of(self.bin_path).view(self.dtype)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(f"cannot read {error.filename or self.prefix}: {error.strerror}")

    def _checked(self, cache: Path | None) -> tuple[int, ...]:
        """What ``_check_index`` finds of an index that is right, or was when it was put in a cache."""

        def check(_: Make) -> Mapping[str, np.ndarray]:
            parts = (self.sizes, self.pointers, self.doc_idx)
            return {"index": np.array(_check_index(self.idx_path, self.dtype, *parts), np.int64)}

        if cache is None or self._idx_stat.st_size < SMALL:
            return tuple(check(np.empty)["index"].tolist())
        name = f"{Path(self.prefix).name}_{digest(self.content_hash())}"
        found = cached(cache, name, Recipe({"index": Form(np.int64, (4,))}, 32, check))
        return tuple(found["index"].tolist())

    def document_start(self, document: int) -> int:
        """Where a document begins in the tokens of the whole data set; of the number of documents, where all end."""
        sequence = self.doc_idx.item(document)
        return self.sequence_start(sequence) if sequence < len(self.sizes) else self.num_tokens

    def tokens_of(self, documents: range) -> int:
        """Tokens of consecutive documents."""
        bounds = documents.start, documents.stop
        if bounds not in self._tokens_of:
            self._tokens_of[bounds] = self.document_start(documents.stop) - self.document_start(documents.start)
        return self._tokens_of[bounds]

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Tokens of some documents, int64 [n]."""
        if not self._is_divided:
            return self.sizes[documents].astype(np.int64)
        begin, stop = (self._sequence_starts(self.doc_idx[bounds]) for bounds in (documents, documents + 1))
        return stop - begin

    def _sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        starts = np.full(len(sequences), self.num_tokens, np.int64)
        inside = sequences < len(self.sizes)
        starts[inside] = self.pointers[sequences[inside]] // self.dtype.itemsize
        return starts

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Where each document begins in the tokens of the whole data set, and their number, int64 [D]."""
        return np.append(self.pointers // self.dtype.itemsize, self.num_tokens)[self.doc_idx]

    def span(self, start: int, length: int) -> np.ndarray:
        """Tokens ``start`` to ``start + length`` of the whole data set, without a copy."""
        return read_whole(self._tokens[start : start + length])

    def content_hash(self) -> str:
        """A hash of the sizes and times of both files and of the header, which costs no reading of tokens."""
        stats = [tuple(self._sizes_and_times[:2]), tuple(self._sizes_and_times[2:])]
        return hashlib.sha256(repr((stats, self._header)).encode()).hexdigest()


def make_builder(out_file: str, impl: str = "mmap", vocab_size: int | None = None) -> "SequenceBuilder":
    """Megatron-LM's function for preprocessing scripts. Of any ``impl`` the data set is read by memory map."""
    from megatron.data.indexed_dataset_builder import SequenceBuilder  # which imports this module

    return SequenceBuilder(out_file, vocab_size)


def unknown_token(indexed: IndexedDataset, token: int, place: str, vocab_size: int) -> DataError:
    """The error for a token that is not in a vocabulary of that size."""
    return DataError(
        f"{indexed.bin_path} holds token {token} in {place}, but the vocabulary ends at {vocab_size - 1}: name the "
        "vocabulary that the data set was made with, or make the data set again"
    )


def check_tokens(indexed: IndexedDataset, tokens: np.ndarray, place: str, vocab_size: int) -> np.ndarray:
    """``tokens`` of the data set, int64. Raises DataError if one is not in a vocabulary of that size."""
    tokens = tokens.astype(np.int64)
    if (wrong := (tokens < 0) | (tokens >= vocab_size)).any():
        raise unknown_token(indexed, tokens[wrong.argmax()], place, vocab_size)
    return tokens


class DocumentLengths:
    """Tokens of each of some documents, int64 [documents], of which parts are computed when they are asked for."""

    def __init__(self, indexed: IndexedDataset, documents: range) -> None:
        self._indexed, self._documents = indexed, documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        return self._indexed.lengths_of(numbers.astype(np.int64) + self._documents.start)

    def sum(self) -> int:
        return self._indexed.tokens_of(self._documents)

    def max(self) -> int:
        """Tokens of the longest document of the data set, perhaps another one: a bound."""
        return self._indexed.longest_document

    @property
    def empty(self) -> int:
        """Empty documents of the data set: a bound."""
        return self._indexed.empty_documents


class Span(NamedTuple):
    """A part of a document."""

    indexed: IndexedDataset
    document: int
    """Number in the data set, from 0."""
    start: int
    stop: int
    """First token of the document, and the one after the last."""

    def tokens(self) -> np.ndarray:
        """The tokens as they are stored, without a copy."""
        begin = self.indexed.document_start(self.document) + self.start
        return self.indexed.span(begin, self.stop - self.start)

    def sequences(self) -> range:
        """The sequences of the document that it has a part of, numbered from 0; they may be sentences."""
        first, end = self.indexed.doc_idx[self.document : self.document + 2]
        ends = np.cumsum(self.indexed.sizes[first:end])
        return range(int(np.searchsorted(ends, self.start, "right")), int(np.searchsorted(ends, self.stop)) + 1)


def _stat_files(prefix: str, bin_path: Path, idx_path: Path) -> tuple[os.stat_result, os.stat_result]:
    """Both files' status; DataError if one is missing."""
    found = {path: _stat_file(path) for path in (bin_path, idx_path)}
    bin_stat, idx_stat = found.values()
    if bin_stat is None or idx_stat is None:
        missing = " and ".join(str(path) for path, stat in found.items() if stat is None)
        raise DataError(f"no data set at {prefix}: {missing} missing ({_where_else(prefix)})")
    return bin_stat, idx_stat


def _stat_file(path: Path) -> os.stat_result | None:
    """None if there is no such file, or it is none."""
    try:
        found = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP):
            raise
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _where_else(prefix: str) -> str:
    """A suggestion for a prefix without a data set."""
    if prefix.endswith((".bin", ".idx")):
        return f"give the prefix without the ending: {prefix[:-4]}"
    path = Path(prefix)
    longer = sorted(path.parent.glob(f"{glob.escape(path.name)}_*.idx"))
    if longer:
        return f"did you mean {longer[0].with_suffix('')}?"
    return "tools/preprocess_data.py makes one"


_Index = tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]
"""Token type, sizes, pointers and ``doc_idx``."""


def _read_legacy_index(path: Path, header: bytes, file_size: int) -> tuple[_Index, None]:
    """The index of a lazy or cached data set, in memory. Raises DataError unless it is complete.

    The header is the magic, version, dtype code, bytes of a token, S twice, and D. Numbers of the sequences, i64[S+1],
    follow, their offsets in tokens, i64[S+1], sizes, i64[S], and doc_idx.
    """
    if len(header) == LEGACY_HEADER.size:
        _, version, code, itemsize, sequences, sizes, documents = LEGACY_HEADER.unpack(header)
        promised = LEGACY_HEADER.size + 8 * (3 * sequences + 2 + documents)
        is_complete = (version, sizes, file_size) == (1, sequences, promised)
        if is_complete and code in DTYPES and DTYPES[code].itemsize == itemsize:
            numbers = np.fromfile(path, "<i8", offset=LEGACY_HEADER.size)
            _, starts, lengths, ends = np.split(numbers, np.cumsum([sequences + 1, sequences + 1, sequences]))
            return (DTYPES[code], lengths.astype("<i4"), starts[:-1] * itemsize, ends), None
    raise DataError(f"{path}, of the older lazy or cached format (TNTIDX), is truncated or damaged: copy it again")


def _read_index(path: Path, header: bytes, file_size: int) -> tuple[_Index, np.ndarray | None]:
    """The index and modes, mapped; DataError unless the header is whole and fits the size of the file."""
    if header.startswith(b"version https://git-lfs"):
        raise DataError(f"{path} is a pointer of Git LFS to the file: git lfs pull replaces it")
    if not MAGIC.startswith(header[: len(MAGIC)]):
        raise DataError(f"{path} is not an index: offset 0 holds {header[: len(MAGIC)]!r} instead of {MAGIC!r}")
    if len(header) < HEADER.size:
        raise DataError(f"{path} is truncated: {file_size} bytes do not hold the header of {HEADER.size}")
    _, version, code, sequences, documents = HEADER.unpack_from(header)
    if version != VERSION:
        raise DataError(f"{path} has version {version} at offset 9; only version {VERSION} can be read")
    if code not in DTYPES:
        known = ", ".join(f"{code} {dtype.name}" for code, dtype in DTYPES.items())
        raise DataError(f"{path} has dtype code {code} at offset 17, which is no type of integers (known: {known})")
    promised = HEADER.size + 12 * sequences + 8 * documents
    if file_size < promised:
        raise DataError(
            f"{path} is truncated: it ends at offset {file_size}, its header promises {promised} bytes "
            f"({sequences} sequences, {documents} document bounds)"
        )
    if file_size not in (promised, promised + sequences):
        raise DataError(
            f"{path} has {file_size - promised} bytes too many at offset {promised}: its header promises "
            f"{sequences} sequences and {documents} document bounds"
        )
    index = content_of(path)
    sizes = np.frombuffer(index, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences)
    ends = np.frombuffer(index, "<i8", documents, HEADER.size + 12 * sequences)
    modes = np.frombuffer(index, "i1", sequences, promised) if file_size > promised else None
    return (DTYPES[code], sizes, pointers, ends), modes


def _check_index(
    path: Path, dtype: np.dtype, sizes: np.ndarray, pointers: np.ndarray, doc_idx: np.ndarray
) -> tuple[int, int, int, int]:
    """Tokens in all and of the longest document, empty documents, whether one is not one sequence; in bounded memory.

    Raises DataError if entries of the index contradict one another: sequences are contiguous, and so are documents.
    """
    tokens, longest, empty, is_divided, what = 0, 0, 0, False, ""
    for begin in range(0, len(sizes), ROWS):
        part = sizes[begin : begin + ROWS]
        ends = tokens + np.cumsum(part, dtype=np.int64)
        if (part < 0).any() or not np.array_equal(pointers[begin : begin + ROWS], (ends - part) * dtype.itemsize):
            what = "sequences"
            break
        tokens = int(ends[-1])
    if not what and not (len(doc_idx) and doc_idx[0] == 0 and doc_idx[-1] == len(sizes)):
        what = "documents"
    for begin in range(0, 0 if what else len(doc_idx) - 1, ROWS):
        bounds = doc_idx[begin : begin + ROWS + 1]
        counts = np.diff(bounds)
        is_divided |= bool((counts != 1).any())
        if (counts < 0).any() or bounds[0] < 0 or bounds[-1] > len(sizes):
            what = "documents"
            break
        starts = np.full(len(bounds), tokens, np.int64)
        starts[bounds < len(sizes)] = pointers[bounds[bounds < len(sizes)]] // dtype.itemsize
        lengths = np.diff(starts)
        longest, empty = max(longest, int(lengths.max())), empty + int(np.sum(lengths == 0))
    if what:
        raise DataError(f"{path} is damaged: the bounds of its {what} contradict one another; copy it again")
    return tokens, longest, empty, int(is_divided)


def _check_bin_size(path: Path, size: int, num_tokens: int, dtype: np.dtype) -> None:
    """DataError unless the token file has the length that the index implies."""
    expected = num_tokens * dtype.itemsize
    if size != expected:
        problem = "is truncated" if size < expected else "does not belong to its index"
        raise DataError(
            f"{path} {problem}: it has {size} bytes, its index says {num_tokens} tokens of {dtype.itemsize} bytes, "
            f"{expected} in all"
        )
