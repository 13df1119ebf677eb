"""New files that are on disk when they are closed, with their SHA-256; and disk space. No torch here.

Files are created, never opened: an existing name, even a symbolic link, is an error. Permissions are those of
``megatron.launch.files``.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from megatron.config.errors import CheckpointError, ResourceError
from megatron.config.reading import regular
from megatron.launch.files import file_mode, folder_mode, replace_file, sync_folder

SAVE_ADVICE = "free some space, keep fewer checkpoints with --keep-last, or name another folder"
_BLOCK = 1 << 20
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Record(NamedTuple):
    """Size and hash of a file's content."""

    size: int
    sha256: str


class NewFile:
    """A file to write from beginning to end, for ``torch.save``."""

    def __init__(self, path: Path):
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode()), "wb", buffering=_BLOCK)
        self._digest, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``. An OSError is raised by ``close()``: torch would raise its own instead."""
        if self._error is None:
            # Both release the interpreter lock, so that each can use a core. A small block takes less than a thread.
            is_large = len(data) >= _BLOCK
            hashing = Thread(target=self._digest.update, args=(data,))
            hashing.start() if is_large else hashing.run()
            try:
                self._file.write(data)
            except OSError as error:
                self._error = error
            if is_large:
                hashing.join()
            self._size += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: ``close()`` flushes."""

    def close(self) -> Record:
        """Flush everything to disk. Raises OSError if any of it could not be written."""
        try:
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            with suppress(OSError):  # if the buffer cannot be written, closing tries again
                self._file.close()
        return Record(self._size, self._digest.hexdigest())


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
    digest, size, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0, opener=regular) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return Record(size, digest.hexdigest())


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
