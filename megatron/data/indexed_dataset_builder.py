"""Writes indexed data sets, in the format of ``indexed_dataset.py``, byte for byte."""

import array
import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron.data.files import sync_folder, take_lock
from megatron.data.indexed_dataset import DTYPES, HEADER, MAGIC, VERSION
from megatron.errors import DataError

CODES = {dtype: code for code, dtype in DTYPES.items()}


def best_dtype(vocab_size: int) -> np.dtype:
    """The type Megatron programs store a vocabulary's tokens in: uint16 below 65500, else int32."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedDatasetBuilder:
    """Writes a data set: ``with IndexedDatasetBuilder(prefix, dtype) as builder: ...``

    Both files grow as ``PREFIX.bin.partial`` and ``PREFIX.idx.partial``. They take their final names
    when the block ends without an exception, and vanish when it ends with one. What a killed process
    left behind is overwritten by the next; a living one is not disturbed.

    Raises:
        DataError: another process is writing the same data set.
        OSError: the disk is full, the folder is missing or not writable.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        assert self.dtype in CODES, f"tokens cannot be stored as {self.dtype}"
        self.paths = (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))
        self._sizes = array.array("i")
        self._doc_idx = array.array("q", [0])
        self._files: list[BinaryIO] = []
        self._finished = False
        self._committed = False

    def __enter__(self) -> "IndexedDatasetBuilder":
        try:
            for path in self.paths:
                self._files.append(_open_partial(path))
        except BaseException:
            self._close()
            raise
        return self

    def add_sequence(self, tokens: ArrayLike) -> None:
        """Append one sequence, 1-D, to the document being written."""
        tokens = np.ascontiguousarray(tokens, self.dtype)
        self._files[0].write(tokens.data)
        self._sizes.append(len(tokens))

    def end_document(self) -> None:
        """End the document: the sequences added since the last call are its own."""
        self._doc_idx.append(len(self._sizes))

    def finish(self) -> None:
        """Bring both files to disk, still under their temporary names.

        The end of the block calls it. Calling it before lets several data sets be complete
        before the first of them is committed.
        """
        if self._finished:
            return
        assert self._doc_idx[-1] == len(self._sizes), "the last document was not ended"
        sizes = np.array(self._sizes, "<i4")
        pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * self.dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(sizes), len(self._doc_idx))
        for part in (header, sizes, pointers, np.array(self._doc_idx, "<i8")):
            self._files[1].write(part)
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
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
        """Give both files their final names. The index goes first of the old pair and comes last of the new."""
        self.paths[1].unlink(missing_ok=True)
        for path in self.paths:
            os.replace(_partial(path), path)
        sync_folder(self.paths[0].parent)
        self._committed = True

    def _close(self) -> None:
        """Close both files; remove them if they did not get their final names."""
        for path, file in zip(self.paths, self._files, strict=False):
            if not self._committed:
                _partial(path).unlink(missing_ok=True)
            # After an error there may be bytes left that the disk does not take.
            with contextlib.suppress(OSError):
                file.close()


def _partial(path: Path) -> Path:
    """The temporary name of a file."""
    return path.with_name(f"{path.name}.partial")


def _open_partial(path: Path) -> BinaryIO:
    """Open the temporary file of ``path`` for writing, empty and locked against other writers."""
    partial = _partial(path)
    file = os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "wb")
    # A writer that was just done may have given the file it locked its final name.
    if not (
        take_lock(file, wait=False) and partial.exists() and os.path.samestat(partial.stat(), os.fstat(file.fileno()))
    ):
        file.close()
        raise DataError(f"{partial} is being written by another process: wait for it, or take another output prefix")
    file.truncate(0)
    return file
