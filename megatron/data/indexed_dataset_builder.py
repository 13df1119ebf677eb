"""Writes indexed data sets in the format of ``index_file.py``, in little memory."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.common.errors import ConfigError, DataError
from megatron.common.files import file_mode, sync_folder
from megatron.data.index_file import DTYPES, HEADER, MAGIC, VERSION

CODES = {dtype: code for code, dtype in DTYPES.items()}
_BLOCK = 1 << 16
"""Index entries in memory at a time."""


def best_dtype(vocab_size: int) -> np.dtype:
    """The type in which Megatron programs store tokens: uint16 for vocabularies below 65500, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class Written(NamedTuple):
    """Number of tokens, sequences and documents written so far."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedDatasetBuilder:
    """Writes a data set: ``with IndexedDatasetBuilder(prefix, dtype) as builder: ...``

    Tokens, index and the ends of documents grow as ``PREFIX.bin.partial``, ``PREFIX.idx.partial`` and
    ``PREFIX.documents.partial``. Data and index take their final names when the block ends without an exception; the
    partial files are removed when it ends with one, unless ``keeps`` is set. The next builder overwrites or continues
    the partial files of a killed process; two builders at the same time are an error.

    ``resume_from``, the result of ``sync()`` of an earlier builder, continues from there. Raises DataError if another
    process is writing the same data set, or a partial file is shorter than ``resume_from``; OSError if the disk is
    full, or the folder missing or not writable.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, resume_from: Written | None = None) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in CODES, f"tokens cannot be stored as {self.dtype}"
        self.keeps = False
        self._paths = tuple(Path(f"{prefix}.{ending}") for ending in ("bin", "idx", "documents"))
        self._resume_from = resume_from
        self._written = resume_from or Written()
        self._files: list[BinaryIO] = []
        self._finished = False
        self._committed = False

    def __enter__(self) -> "IndexedDatasetBuilder":
        self.keeps = self._resume_from is not None
        tokens, sequences, documents = self._written
        sizes = (tokens * self.dtype.itemsize, HEADER.size + 4 * sequences, 8 * documents)
        for path in self._paths[:2]:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "there is a folder of this name", str(path))
        try:
            for path, size in zip(self._paths, sizes, strict=True):
                self._files.append(_open_partial(path, size if self._resume_from else None))
            if self._resume_from is None:
                self._files[1].write(bytes(HEADER.size))
        except BaseException:
            self._close()
            raise
        return self

    def add_document(self, *sequences: ArrayLike) -> None:
        """Append a document of ``sequences``, each [tokens]."""
        arrays = [np.asarray(sequence, self.dtype) for sequence in sequences]
        self.add_documents(np.concatenate([np.empty(0, self.dtype), *arrays]), [[len(array) for array in arrays]])

    def add_documents(self, tokens: np.ndarray, sizes: Sequence[Sequence[int]]) -> None:
        """Append documents: ``tokens`` of all sequences, and for each document the ``sizes`` of its sequences."""
        sequence_sizes = np.fromiter(chain.from_iterable(sizes), "<i4")
        before = self._written
        ends = before.sequences + np.cumsum([len(document) for document in sizes], dtype="<i8")
        added = (np.ascontiguousarray(tokens, self.dtype), sequence_sizes, ends)
        for file, array in zip(self._files, added, strict=True):
            file.write(array.data)
        self._written = Written(*(old + len(array) for old, array in zip(before, added, strict=True)))

    def sync(self) -> Written:
        """Flush everything to disk, and return the size."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        return self._written

    def finish(self) -> None:
        """Complete both files and flush them to disk, still under their temporary names.

        The end of the ``with`` block calls it. Call it earlier to complete several data sets before any is committed.
        """
        if self._finished:
            return
        _, sequences, documents = self._written
        for file in self._files:
            file.flush()
        index = self._files[1]
        _append_pointers(index, sequences, self.dtype.itemsize)
        index.write(bytes(8))
        for ends in _blocks(self._files[2], 0, "<i8", documents):
            index.write(ends.data)
        index.seek(0)
        index.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], sequences, documents + 1))
        self.sync()
        self._finished = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
                self._commit()
        finally:
            self._close()

    def _commit(self) -> None:
        """Rename both files. The old index is removed first and the new one appears last."""
        tokens, index, documents = self._paths
        index.unlink(missing_ok=True)
        for path in (tokens, index):
            os.replace(_partial(path), path)
        _partial(documents).unlink()
        sync_folder(tokens.parent)
        self._committed = True

    def _close(self) -> None:
        """Close the files, and remove them unless they were committed or are kept for a resumed run."""
        for path, file in zip(self._paths, self._files, strict=False):
            if not (self._committed or self.keeps):
                _partial(path).unlink(missing_ok=True)
            # After an error, buffered bytes may not fit on the disk.
            with contextlib.suppress(OSError):
                file.close()


class SequenceBuilder:
    """Megatron-LM's builder: sequences are added one at a time, documents end, and ``finalize`` writes the index.

    ``out_file`` is the ``.bin`` file. Without ``vocab_size``, which limits tokens, they are stored as int32.
    """

    def __init__(self, out_file: str | Path, vocab_size: int | None = None) -> None:
        self._prefix = str(out_file).removesuffix(".bin")
        self._sequences: list[np.ndarray] = []
        self._size = 2**31 if vocab_size is None else vocab_size
        self._builder = IndexedDatasetBuilder(self._prefix, best_dtype(self._size)).__enter__()

    def add_item(self, tokens: ArrayLike) -> None:
        """Append a sequence, [tokens], such as a tensor. Raises DataError if a token is not in the vocabulary."""
        sequence = np.asarray(tokens)
        if sequence.size and not 0 <= sequence.min() <= sequence.max() < self._size:
            wrong = sequence.min() if sequence.min() < 0 else sequence.max()
            raise DataError(f"{self._prefix}: token {wrong} is not in the vocabulary of {self._size} tokens")
        self._sequences.append(sequence)

    def end_document(self) -> None:
        """End the document that consists of the sequences added since the last document."""
        self._builder.add_document(*self._sequences)
        self._sequences = []

    def finalize(self, index_file: str | Path) -> None:
        """Complete the data set. ``index_file`` must be the path next to the ``.bin`` file."""
        if str(index_file) != f"{self._prefix}.idx":
            raise ConfigError(f"finalize: the index of {self._prefix}.bin is {self._prefix}.idx, not {index_file}")
        if self._sequences:
            self.end_document()
        self._builder.__exit__(None, None, None)


def _append_pointers(index: BinaryIO, sequences: int, itemsize: int) -> None:
    """Append the pointers of all sequences, computed from the sizes in the file."""
    start = 0
    for sizes in _blocks(index, HEADER.size, "<i4", sequences):
        ends = start + np.cumsum(sizes, dtype="<i8") * itemsize
        index.seek(0, os.SEEK_END)
        index.write((ends - sizes.astype("<i8") * itemsize).data)
        start = int(ends[-1])
    index.seek(0, os.SEEK_END)


def _blocks(file: BinaryIO, offset: int, dtype: str, count: int) -> Iterator[np.ndarray]:
    """Yield ``count`` integers of a file, from ``offset`` on, in blocks."""
    size = np.dtype(dtype).itemsize
    for first in range(0, count, _BLOCK):
        content = os.pread(file.fileno(), size * min(_BLOCK, count - first), offset + size * first)
        yield np.frombuffer(content, dtype)


def _partial(path: Path) -> Path:
    """The temporary name of a file."""
    return path.with_name(f"{path.name}.partial")


def _open_partial(path: Path, size: int | None) -> BinaryIO:
    """Open and lock the temporary file of ``path``, truncated to ``size`` bytes, or to 0 without ``size``."""
    partial = _partial(path)
    file = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, file_mode()), "r+b")
    # Another builder may have finished in between, and renamed the file that is locked here.
    if not (_lock(file) and partial.exists() and os.path.samestat(partial.stat(), os.fstat(file.fileno()))):
        file.close()
        raise DataError(f"{partial} is being written by another process: wait for it, or use another output prefix")
    if os.fstat(file.fileno()).st_size < (size or 0):
        file.close()
        raise DataError(f"{partial} is shorter than when it was left: run without --resume to start over")
    file.truncate(size or 0)
    file.seek(0, os.SEEK_END)
    return file


def _lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed; returns False if another process holds the lock.

    The kernel drops the lock of a killed process. On a file system without locks, a second builder is not detected.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True
