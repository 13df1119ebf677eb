"""New files that are on disk when they are closed, with their hashes; and disk space. No torch here.

Files are created, never opened: an existing name, even a symbolic link, is an error. Permissions are those of
``megatron.launch.files``.
"""

import errno
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

from megatron.config.errors import CheckpointError, ResourceError
from megatron.config.reading import regular
from megatron.launch.files import file_mode, folder_mode, replace_file, sync_folder

SAVE_ADVICE = "free some space, keep fewer checkpoints with --keep-last, or name another folder"
_BLOCK = 1 << 20
_BLOCKS = 8
"""Blocks of a new file in memory."""
_READERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that verify a file."""
_Block = tuple[memoryview, tuple["Future[None]", ...]]
"""Memory of a block, and the threads that still use its content."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Record(NamedTuple):
    """Size and hashes of a file's content."""

    size: int
    sha256: str
    xxh128: str | None = None
    """XXH3-128 of the digests by XXH3-128 of all blocks of 1 MiB: ten times faster to verify, and by several threads.
    None in checkpoints of earlier versions."""


class NewFile:
    """A file to write from beginning to end, for ``torch.save``.

    Blocks are hashed and written by two threads while the next one is collected. Each is sent to disk immediately, so
    that little is left to flush in the end.
    """

    def __init__(self, path: Path):
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode()), "wb")
        self._sha256, self._xxh128, self._size = hashlib.sha256(), xxh3_128(), 0
        self._threads = ThreadPoolExecutor(1, "hash"), ThreadPoolExecutor(1, "write")
        self._blocks = deque[_Block]((memoryview(bytearray(_BLOCK)), ()) for _ in range(_BLOCKS))
        self._filled = 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``. An OSError is raised by ``close()``: torch would raise its own instead."""
        rest = memoryview(data)
        while rest:
            count = min(len(rest), _BLOCK - self._filled)
            self._blocks[0][0][self._filled : self._filled + count] = rest[:count]
            self._filled, rest = self._filled + count, rest[count:]
            if self._filled == _BLOCK:
                self._hand_over()
        return len(data)

    def _hand_over(self) -> None:
        """Have the collected block hashed and written, and wait until the next one is free."""
        block, _ = self._blocks.popleft()
        content, self._filled = block[: self._filled], 0
        hashing, writing = self._threads
        users = hashing.submit(self._sha256.update, content), writing.submit(self._store, content)
        self._blocks.append((block, users))
        _wait(self._blocks[0])

    def _store(self, block: memoryview) -> None:
        self._xxh128.update(xxh3_128_digest(block))
        self._size += len(block)
        if self._error is None:
            try:
                self._file.write(block)
                # Starts to write the block to disk, in the background; what is not there yet stays in memory.
                os.posix_fadvise(self._file.fileno(), self._size - len(block), len(block), os.POSIX_FADV_DONTNEED)
            except OSError as error:
                self._error = error

    def flush(self) -> None:
        """Do nothing: ``close()`` flushes."""

    def close(self) -> Record:
        """Flush everything to disk. Raises OSError if any of it could not be written."""
        try:
            if self._filled:
                self._hand_over()
            for block in self._blocks:
                _wait(block)
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            for thread in self._threads:
                thread.shutdown()
            with suppress(OSError):  # if the buffer cannot be written, closing tries again
                self._file.close()
        return Record(self._size, self._sha256.hexdigest(), self._xxh128.hexdigest())


def _wait(block: _Block) -> None:
    for user in block[1]:
        user.result()


def write_text(path: Path, text: str) -> Record:
    """Write a new UTF-8 file."""
    file = NewFile(path)
    file.write(text.encode())
    return file.close()


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
    return Record(path.stat().st_size, sha256_of(path), xxh128_of(path))


def sha256_of(path: Path) -> str:
    """SHA-256 of a file. Raises OSError if it cannot be read."""
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0, opener=regular) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def xxh128_of(path: Path) -> str:
    """``Record.xxh128`` of a file. Raises OSError if it cannot be read."""
    with open(path, "rb", buffering=0, opener=regular) as file, ThreadPoolExecutor(_READERS, "read") as threads:

        def digest(offset: int) -> bytes:
            block = b""  # a disk in the network may return less than was asked for
            while more := os.pread(file.fileno(), _BLOCK - len(block), offset + len(block)):
                block += more
            return xxh3_128_digest(block)

        offsets = range(0, os.fstat(file.fileno()).st_size, _BLOCK)
        return xxh3_128(b"".join(threads.map(digest, offsets))).hexdigest()


def check_disk_space(folder: Path, what: str, size: int, advice: str = SAVE_ADVICE) -> None:
    """Raises ResourceError with ``advice`` if the disk of ``folder`` has less than ``size`` bytes free for ``what``."""
    if size > shutil.disk_usage(folder).free:
        raise ResourceError(f"{_no_space(folder, what, size)}: {advice}")


@contextmanager
def disk_errors(folder: Path, what: str, size: int) -> Iterator[None]:
    """Convert an OSError of the block, which writes ``what`` of ``size`` bytes into ``folder``, to a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            problem = f"{_no_space(folder, what, size)} ({error.strerror})"
            raise ResourceError(f"--save {folder}: {problem}: {SAVE_ADVICE}") from error
        file = f"{error.filename}: " if error.filename else ""
        problem = f"{what} cannot be written ({file}{error.strerror or error})"
        raise CheckpointError(f"--save {folder}: {problem}: check the disk, or name another folder") from error


def _no_space(folder: Path, what: str, size: int) -> str:
    free = shutil.disk_usage(folder if os.path.isdir(folder) else folder.absolute().anchor).free
    return f"{what} needs {size:,} bytes, and the disk has {free:,} free"
