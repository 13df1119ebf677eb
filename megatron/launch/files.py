"""Atomic replacement of files. No torch here."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

UNFINISHED = ".partial"
"""Suffix of a file or folder that is still being written. Nothing reads it."""


@contextmanager
def replace_file(path: Path, mode: int = 0o666, *, text: bool = False) -> Iterator[IO[Any]]:
    """A file to write, binary or UTF-8 ``text``, that replaces ``path`` when the block ends without an exception.

    It is on disk by then, and so is its name. Until then, and after an exception, ``path`` is what it was. If ``path``
    is a symbolic link, the link is replaced, not its target.

    Args:
        mode: permissions of the file, before the umask.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    kind: dict[str, Any] = {"mode": "w", "encoding": "utf-8", "newline": "\n"} if text else {"mode": "wb"}
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), **kind) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    sync(path, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """Flush a file, opened with ``flags``, to disk."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
