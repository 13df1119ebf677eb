"""Permissions of new files, and atomic replacement of files. No torch here."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.common.errors import ConfigError

UNFINISHED = ".partial"
"""Suffix of a file or folder that is still being written. Nothing reads it."""
UMASK = "MEGATRON_UMASK"
"""Environment variable: permissions withheld from new files, as three octal digits; the process's own umask also is."""


def withheld_permissions(environ: Mapping[str, str]) -> int:
    """Permissions that no new file has: those of ``UMASK``, by default 027, which leaves 0640 and 0750 for folders.

    Raises ConfigError unless the variable leaves the owner all permissions, and withholds writing from all users.
    """
    text = environ.get(UMASK) or "027"
    if not re.fullmatch("0?0[0-7][2367]", text):
        raise ConfigError(
            f"{UMASK}={text} must be 027 (files for the owner and, to read, the group), 022 (for all users to read), "
            "007 (for the group to write, too) or 077 (for the owner alone)"
        )
    return int(text, 8)


def restrict_new_files(environ: Mapping[str, str]) -> None:
    """Withhold permissions from every file that this process and its children create, libraries included.

    Raises ConfigError as ``withheld_permissions``.
    """
    withheld = withheld_permissions(environ)
    os.umask(os.umask(0o077) | withheld)


def file_mode() -> int:
    """Mode with which a file is created: 0640, unless ``UMASK`` says otherwise."""
    return 0o666 & ~withheld_permissions(os.environ)


def folder_mode() -> int:
    """Mode with which a folder is created: 0750, unless ``UMASK`` says otherwise."""
    return 0o777 & ~withheld_permissions(os.environ)


def lacks_inodes(path: Path) -> bool:
    """Whether no new file can be made on the disk of ``path``, whatever space it has; some disks have no such limit."""
    status = os.statvfs(next(place for place in (path, *path.absolute().parents) if place.exists()))
    return status.f_files > 0 and status.f_favail == 0


@contextmanager
def replace_file(path: Path, *, text: bool = False, durable: bool = True) -> Iterator[IO[Any]]:
    """A file to write, binary or UTF-8 ``text``, that replaces ``path`` when the block ends without an exception.

    If ``durable``, it is on disk by then, and so is its name. Until then, and after an exception, ``path`` is what it
    was. If ``path`` is a symbolic link, the link is replaced, not its target. A device, such as /dev/null, is written
    to.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{UNFINISHED}")
    kind: dict[str, Any] = {"mode": "w", "encoding": "utf-8", "newline": "\n"} if text else {"mode": "wb"}
    if path.is_char_device() and not path.is_symlink():
        with open(path, **kind) as file:
            yield file
        return
    if path.exists() and not path.is_file():  # such as a FIFO, or a link to a device
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode()), **kind) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
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
