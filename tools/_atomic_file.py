"""Files and folders that appear whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.config.errors import ConfigError, ResourceError


@contextmanager
def atomic_file(path: Path, flag: str, *, binary: bool = False) -> Iterator[IO[Any]]:
    """A file to write, UTF-8 or ``binary``, that takes the name ``path`` when the block ends without an error.

    Folders on the way are made. ``flag`` is the one that named the path, for the messages: raises
    ConfigError if it cannot be written, ResourceError if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") if binary else open(temporary, "w", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _told(error, path, flag) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_path(path: Path, flag: str) -> Iterator[Path]:
    """A name to write a file or a folder under, which becomes ``path`` when the block ends without an error.

    ``path`` must not be there yet, or be an empty folder. Folders on the way are made. ``flag`` is the one that
    named it, for the messages: raises ConfigError if it cannot be written, ResourceError if the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        for written in (*temporary.rglob("*"), temporary):
            _sync(written)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise _told(error, path, flag) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)


def check_vacant(path: Path, flag: str) -> None:
    """Raises ConfigError where there is something at ``path`` already, other than an empty folder."""
    if path.is_dir() and not any(path.iterdir()) or not os.path.lexists(path):
        return
    raise ConfigError(f"{flag} {path} is there already; name another place, or move it away")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _told(error: OSError, path: Path, flag: str) -> ConfigError | ResourceError:
    if error.errno == errno.ENOSPC:
        return ResourceError(f"{flag} {path}: the disk is full; free some space and run this again")
    return ConfigError(f"{flag} {path}: cannot be written ({error.strerror}); name another place")
