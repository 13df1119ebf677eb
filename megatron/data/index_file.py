"""Reads and checks ``PREFIX.idx``, the index of an indexed data set of the Megatron family (MMIDIDX).

The format is little-endian and packed, with S sequences and D - 1 documents:

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

Older lazy and cached data sets (TNTIDX) have the same ``PREFIX.bin``, and an index of 8-byte integers:

    0          8 bytes    magic "TNTIDX", two zero bytes
    8          u64        version, 1; dtype code; bytes of a token; S; S; D
    56         i64        numbers of the sequences [S + 1], their offsets in tokens [S + 1], sizes [S], doc_idx [D]
"""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.common.errors import DataError
from megatron.data.map_cache import ROWS
from megatron.data.mapped_file import map_file

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


class Index(NamedTuple):
    """The content of an index file."""

    header: bytes
    """The first ``HEADER.size`` bytes of the file."""
    dtype: np.dtype
    """Type of the tokens."""
    sizes: np.ndarray
    pointers: np.ndarray
    doc_idx: np.ndarray
    modes: np.ndarray | None = None


class Totals(NamedTuple):
    """Totals that a check of an index computes."""

    tokens: int
    longest: int
    """Tokens of the longest document."""
    empty: int
    """Documents without a token."""
    is_divided: int
    """1 if some document has not exactly one sequence, else 0."""


def read_index(path: Path) -> Index:
    """Map an index file. Raises DataError unless its header is valid and agrees with the size of the file."""
    content = map_file(path)
    head = content[: LEGACY_HEADER.size].tobytes()
    if head.startswith(LEGACY_MAGIC):
        return _read_legacy(path, head, content)
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise DataError(f"{path} is not an index: offset 0 holds {head[: len(MAGIC)]!r} instead of {MAGIC!r}")
    if len(head) < HEADER.size:
        raise DataError(f"{path} is truncated: {len(content)} bytes do not hold the header of {HEADER.size}")
    _, version, code, sequences, bounds = HEADER.unpack_from(head)
    if version != VERSION:
        raise DataError(f"{path} has version {version} at offset 9; only version {VERSION} can be read")
    if code not in DTYPES:
        known = ", ".join(f"{code} {dtype.name}" for code, dtype in DTYPES.items())
        raise DataError(f"{path} has dtype code {code} at offset 17, which is no type of integers (known: {known})")
    promised = HEADER.size + 12 * sequences + 8 * bounds
    header = f"its header promises {promised} bytes ({sequences} sequences, {bounds} document bounds)"
    if len(content) < promised:
        raise DataError(f"{path} is truncated: it ends at offset {len(content)}, {header}")
    if len(content) not in (promised, promised + sequences):
        raise DataError(f"{path} has {len(content) - promised} bytes too many at offset {promised}: {header}")
    sizes = np.frombuffer(content, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences)
    doc_idx = np.frombuffer(content, "<i8", bounds, HEADER.size + 12 * sequences)
    modes = np.frombuffer(content, "i1", sequences, promised) if len(content) > promised else None
    return Index(head[: HEADER.size], DTYPES[code], sizes, pointers, doc_idx, modes)


def _read_legacy(path: Path, head: bytes, content: np.ndarray) -> Index:
    """The index of an older lazy or cached data set, in memory."""
    if len(head) == LEGACY_HEADER.size:
        _, version, code, itemsize, sequences, sizes_count, bounds = LEGACY_HEADER.unpack(head)
        promised = LEGACY_HEADER.size + 8 * (3 * sequences + 2 + bounds)
        is_complete = (version, sizes_count, len(content)) == (1, sequences, promised)
        if is_complete and code in DTYPES and DTYPES[code].itemsize == itemsize:
            numbers = np.frombuffer(content, "<i8", offset=LEGACY_HEADER.size)
            _, starts, sizes, doc_idx = np.split(numbers, np.cumsum([sequences + 1, sequences + 1, sequences]))
            return Index(head[: HEADER.size], DTYPES[code], sizes.astype("<i4"), starts[:-1] * itemsize, doc_idx)
    raise DataError(f"{path}, of the older lazy or cached format (TNTIDX), is truncated or damaged: copy it again")


def check(path: Path, index: Index) -> Totals:
    """Check all entries of an index, in bounded memory, and return its totals.

    Raises DataError if entries contradict each other: sequences must be contiguous, and so must documents.
    """
    tokens = 0
    for begin in range(0, len(index.sizes), ROWS):
        sizes = index.sizes[begin : begin + ROWS]
        ends = tokens + np.cumsum(sizes, dtype=np.int64)
        pointers = index.pointers[begin : begin + ROWS]
        if (sizes < 0).any() or not np.array_equal(pointers, (ends - sizes) * index.dtype.itemsize):
            raise _contradiction(path, "sequences")
        tokens = int(ends[-1])
    longest, empty, is_divided = 0, 0, False
    if not (len(index.doc_idx) and index.doc_idx[0] == 0 and index.doc_idx[-1] == len(index.sizes)):
        raise _contradiction(path, "documents")
    for begin in range(0, len(index.doc_idx) - 1, ROWS):
        bounds = index.doc_idx[begin : begin + ROWS + 1]
        counts = np.diff(bounds)
        if (counts < 0).any() or bounds[0] < 0 or bounds[-1] > len(index.sizes):
            raise _contradiction(path, "documents")
        lengths = np.diff(starts_of(index, bounds, tokens))
        longest, empty = max(longest, int(lengths.max())), empty + int(np.sum(lengths == 0))
        is_divided |= bool((counts != 1).any())
    return Totals(tokens, longest, empty, int(is_divided))


def _contradiction(path: Path, what: str) -> DataError:
    return DataError(f"{path} is damaged: the bounds of its {what} contradict one another; copy it again")


def starts_of(index: Index, sequences: np.ndarray, tokens: int) -> np.ndarray:
    """The first token of each of ``sequences``, int64 [n]; it is ``tokens`` for the number of all sequences."""
    starts = np.full(len(sequences), tokens, np.int64)
    inside = sequences < len(index.sizes)
    starts[inside] = index.pointers[sequences[inside]] // index.dtype.itemsize
    return starts
