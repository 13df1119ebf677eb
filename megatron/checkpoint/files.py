"""Files that are new, safe on the disk, and known by their SHA-256. No torch here.

A file is made, never opened: what has its name already, a link too, is an error. Modes are 0640 and 0750 for folders,
less what the umask takes away.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, NamedTuple, TypeVar

from megatron.config.errors import CheckpointError, ResourceError, UserError

FILE_MODE = 0o640
FOLDER_MODE = 0o750
UNFINISHED = ".partial"
"""Ends the name of whatever has not got its own name yet; nobody reads it, and the next save removes it."""
_BLOCK = 1 << 20


class Record(NamedTuple):
    """What tells a file's content from another."""

    size: int
    sha256: str


class NewFile:
    """A file to write from beginning to end, as ``torch.save`` and ``print`` take it."""

    def __init__(self, path: Path):
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb", buffering=_BLOCK)
        self._digest, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Take all of ``data``. What the disk has against it, ``close()`` says: torch would hide it behind its own."""
        if self._error is None:
            # Both let go of the interpreter, so that each can have a core.
            with _beside(lambda: self._digest.update(data), is_worth_it=len(data) >= _BLOCK):
                try:
                    self._file.write(data)
                except OSError as error:
                    self._error = error
            self._size += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing: ``close()`` does."""

    def close(self) -> Record:
        """See that the disk has everything. Raises OSError, here or earlier, where it has not."""
        try:
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            _close_quietly(self._file)
        return Record(self._size, self._digest.hexdigest())


def write_text(path: Path, text: str) -> Record:
    """A new file of UTF-8."""
    file = NewFile(path)
    file.write(text.encode())
    return file.close()


def replace_text(path: Path, text: str) -> None:
    """Give ``path`` another content in one instant; a link there is replaced itself, not what it points to."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        write_text(aside, text)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make ``path``, and the folders on the way to it, where they are missing."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(FOLDER_MODE, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """See that the disk has the names in ``path``."""
    sync(path, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """See that the disk has what is at ``path``."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_of(path: Path) -> Record:
    """The record of a file that is there. Raises OSError where it cannot be read."""
    digest, size, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
            size += count
    return Record(size, digest.hexdigest())


@contextmanager
def _beside(step: Callable[[], None], *, is_worth_it: bool) -> Iterator[None]:
    """``step`` in a thread of its own while the block runs; or before it, where that would take longer."""
    if is_worth_it:
        thread = Thread(target=step)
        thread.start()
        yield
        thread.join()
    else:
        step()
        yield


def _close_quietly(file: IO[bytes]) -> None:
    """A buffer that cannot be written is written once more on closing, with the same error."""
    try:
        file.close()
    except OSError:
        pass


T = TypeVar("T")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_room(folder: Path, what: str, size: int) -> None:
    """Raises ResourceError where the disk of ``folder`` has not ``size`` bytes for ``what``."""
    if size > shutil.disk_usage(folder).free:
        raise ResourceError(_no_room(folder, what, size))


def on_disk(step: Callable[[], T], folder: Path, what: str, size: int) -> Callable[[], T]:
    """``step``, which writes ``what`` of ``size`` bytes, with OSError turned into a UserError."""

    def guarded() -> T:
        try:
            return step()
        except OSError as error:
            raise _refusal(error, folder, what, size) from error

    return guarded


def _refusal(error: OSError, folder: Path, what: str, size: int) -> UserError:
    if error.errno in _FULL:
        return ResourceError(_no_room(folder, what, size, f" ({error.strerror})"))
    where = f"{error.filename}: " if error.filename else ""
    return CheckpointError(
        f"--save {folder}: {what} cannot be written ({where}{error.strerror or error}): "
        "see what became of the disk, or name another folder"
    )


def _no_room(folder: Path, what: str, size: int, cause: str = "") -> str:
    free = shutil.disk_usage(folder if os.path.isdir(folder) else folder.absolute().anchor).free
    return (
        f"--save {folder}: {what} needs {size:,} bytes, and the disk has {free:,} free"
        f"{cause}: free some space, keep fewer checkpoints with --keep-last, or name another folder"
    )
