"""Writes and hashes durable files, and explains why the disk does not take them. No torch here.

Files are always created: an existing name, even a symbolic link, is an error. ``megatron.common.files`` sets their
permissions.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

from megatron.common.errors import CheckpointError, ResourceError, limit_advice, unwritable
from megatron.common.files import file_mode, folder_mode, lacks_inodes, replace_file, sync_folder
from megatron.common.reading import regular

SAVE_ADVICE = "free some space, keep fewer checkpoints with --keep-last, or name another folder"
FILE_OVERHEAD = 1 << 16
"""Approximate bytes of a file in addition to its tensors."""
_BLOCK = 1 << 20
_READERS = min(4, len(os.sched_getaffinity(0)))
"""Number of threads that verify a file."""


class Record(NamedTuple):
    """Size and hash of a file's content."""

    size: int
    sha256: str | None = None
    """Only in checkpoints of earlier versions."""
    xxh128: str | None = None
    """XXH3-128 of the XXH3-128 digests of all blocks of 1 MiB, which several threads can verify. None in checkpoints of
    earlier versions."""


class NewFile:
    """A new file that is written sequentially, such as by ``torch.save``, and hashed while it is written."""

    def __init__(self, path: Path):
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode()), "wb")
        self._digests, self._block, self._size = xxh3_128(), xxh3_128(), 0
        self._error: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data``. An OSError is raised only by ``close()``, since torch's writer would replace it."""
        rest = memoryview(data).cast("B")
        count = len(rest)
        while rest and self._error is None:
            room = _BLOCK - self._size % _BLOCK
            piece, rest = rest[:room], rest[room:]
            self._block.update(piece)
            self._size += len(piece)
            if self._size % _BLOCK == 0:
                self._end_block()
            try:
                self._file.write(piece)
            except OSError as error:
                self._error = error
        return count

    def flush(self) -> None:
        """Do nothing: ``close()`` flushes."""

    def _end_block(self) -> None:
        self._digests.update(self._block.digest())
        self._block.reset()

    def close(self) -> Record:
        """Flush everything to disk. Raises OSError if anything could not be written."""
        try:
            if self._size % _BLOCK:
                self._end_block()
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            with suppress(OSError):  # closing tries again to write the buffer
                self._file.close()
        return Record(self._size, xxh128=self._digests.hexdigest())


def write_text(path: Path, text: str) -> Record:
    """Write a new UTF-8 file."""
    file = NewFile(path)
    file.write(text.encode())
    return file.close()


def copy_file(source: Path, path: Path) -> Record:
    """Copy ``source`` to a new file. Raises OSError if it cannot be read, or the file not be written."""
    with open(source, "rb", buffering=0, opener=regular) as content:
        file = NewFile(path)
        try:
            shutil.copyfileobj(content, file, _BLOCK)
        finally:
            record = file.close()
    return record


def replace_text(path: Path, text: str) -> None:
    """Replace the content of ``path`` atomically. A symbolic link is replaced, not its target."""
    with replace_file(path, text=True) as file:
        file.write(text)


def make_folder(path: Path) -> None:
    """Create ``path`` and its missing parents."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(folder_mode(), exist_ok=True)
        sync_folder(path.parent)


def record_of(path: Path) -> Record:
    """The record of an existing file. Raises OSError if it cannot be read."""
    return Record(path.stat().st_size, xxh128=xxh128_of(path))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file. Raises OSError if it cannot be read."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=regular) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def xxh128_of(path: Path) -> str:
    """``Record.xxh128`` of a file. Raises OSError if it cannot be read."""
    with open(path, "rb", buffering=0, opener=regular) as file:

        def digest(offset: int) -> bytes:
            block = b""  # a network file system may return less than requested
            while more := os.pread(file.fileno(), _BLOCK - len(block), offset + len(block)):
                block += more
            return xxh3_128_digest(block)

        offsets = range(0, os.fstat(file.fileno()).st_size, _BLOCK)
        if len(offsets) < _READERS:  # starting threads would take longer
            return xxh3_128(b"".join(map(digest, offsets))).hexdigest()
        with ThreadPoolExecutor(_READERS, "read") as threads:
            return xxh3_128(b"".join(threads.map(digest, offsets))).hexdigest()


def check_disk_space(folder: Path, what: str, size: int, advice: str = SAVE_ADVICE) -> None:
    """Raise ResourceError with ``advice`` if the disk of ``folder`` has less than ``size`` bytes free for ``what``."""
    if size > shutil.disk_usage(folder).free:
        raise ResourceError(f"{_no_space(folder, what, size)}: {advice}")


@contextmanager
def disk_errors(folder: Path, what: str, size: int) -> Iterator[None]:
    """Turn an OSError in the block, which writes ``what`` of ``size`` bytes into ``folder``, into a UserError."""
    try:
        yield
    except OSError as error:
        problem = unwritable(what, error)
        if (advice := limit_advice(error)) is None:
            raise CheckpointError(f"--save {folder}: {problem}: check the disk, or name another folder") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            problem, advice = f"{_no_space(folder, what, size)} ({error.strerror})", SAVE_ADVICE
        raise ResourceError(f"--save {folder}: {problem}: {advice}") from error


def _no_space(folder: Path, what: str, size: int) -> str:
    if lacks_inodes(folder):
        return f"{what} needs new files, and the disk has no inodes left"
    free = shutil.disk_usage(folder if os.path.isdir(folder) else folder.absolute().anchor).free
    needs = f"needs {size:,} bytes" if size else "cannot be written"
    return f"{what} {needs}, and the disk has {free:,} free"
