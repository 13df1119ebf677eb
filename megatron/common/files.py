"""Permissions of new files, and atomic replacement of files. No torch here."""

import errno
import json
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.common.errors import ConfigError

UNFINISHED = ".partial"
"""Suffix of a file or folder that is still being written. Nothing reads it."""
UMASK = "MEGATRON_UMASK"
"""Environment variable: umask for new files, as three octal digits, in addition to the umask of the process."""


def withheld_permissions(environ: Mapping[str, str]) -> int:
    """The umask for new files, from ``UMASK``; by default 027, which gives files 0640 and folders 0750.

    Raises ConfigError unless the umask leaves all permissions to the owner, and denies other users to write.
    """
    text = environ.get(UMASK) or "027"
    if not re.fullmatch("0?0[0-7][2367]", text):
        raise ConfigError(
            f"{UMASK}={text} must be 027 (files for the owner and, to read, the group), 022 (for all users to read), "
            "007 (for the group to write, too) or 077 (for the owner only)"
        )
    return int(text, 8)


def restrict_new_files(environ: Mapping[str, str]) -> None:
    """Apply the umask of ``UMASK`` to all files that this process, its libraries and its children create.

    Raises ConfigError as ``withheld_permissions``, also for the umask of the process.
    """
    withheld = withheld_permissions(environ)
    given = os.umask(0o077)
    if given & 0o700:
        raise ConfigError(f"umask {given:03o} takes permissions from the owner of new files: set umask 027 or 022")
    os.umask(given | withheld)


def file_mode() -> int:
    """Mode for new files: 0640, unless ``UMASK`` is set."""
    return 0o666 & ~withheld_permissions(os.environ)


def folder_mode() -> int:
    """Mode for new folders: 0750, unless ``UMASK`` is set."""
    return 0o777 & ~withheld_permissions(os.environ)


def lacks_inodes(path: Path) -> bool:
    """Whether the file system of ``path`` has no free inodes for new files; some file systems have no limit."""
    status = os.statvfs(next(place for place in (path, *path.absolute().parents) if place.exists()))
    return status.f_files > 0 and status.f_favail == 0


@contextmanager
def signals_raised() -> Iterator[None]:
    """In the block, SIGINT and SIGTERM raise SystemExit if they would end the process, so that it cleans up.

    Not in other threads than the main one, which Python's signal handlers run in.
    """
    owner, is_main = os.getpid(), threading.current_thread() is threading.main_thread()

    def leave(number: int, _: Any) -> None:
        if os.getpid() != owner:  # a fork, which leaves the files to its parent
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise SystemExit(128 + number)

    both = (signal.SIGINT, signal.SIGTERM)
    fatal = [number for number in both if is_main and signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in fatal:
            signal.signal(number, leave)
        yield
    finally:
        for number in fatal:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def replace_file(path: Path, *, text: bool = False, durable: bool = True) -> Iterator[IO[Any]]:
    """Open a file, binary or UTF-8 ``text``, that atomically replaces ``path`` if the block ends without an exception.

    Until then, and after an exception or as in ``signals_raised``, ``path`` is unchanged. If ``durable``, file and name
    are flushed to disk. If ``path`` is a symbolic link, the link is replaced, not its target. A device, such as
    /dev/null, is written directly. Raises OSError if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{UNFINISHED}")
    kind: dict[str, Any] = {"mode": "w", "encoding": "utf-8", "newline": "\n"} if text else {"mode": "wb"}
    if path.is_char_device() and not path.is_symlink():
        with open(path, **kind) as file:
            yield file
        return
    if path.exists() and not path.is_file():  # such as a FIFO, or a link to a device
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    with signals_raised():
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, file_mode()), **kind) as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if error.filename in (None, str(temporary)):
                error.filename = str(path)
            raise
        finally:
            temporary.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def append_only(path: str, flags: int) -> int:
    """An ``opener`` for ``open`` in mode "a". Raises OSError for a link, and for a FIFO, which it does not wait for."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, file_mode())
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a file", path)
    os.set_blocking(descriptor, True)  # of a terminal
    return descriptor


def as_json(value: Any, **settings: Any) -> str:
    """JSON in UTF-8. Halves of a surrogate pair, which JSON may have and UTF-8 has not, stay escaped."""
    return json.dumps(value, ensure_ascii=False, **settings).encode(errors="backslashreplace").decode()


def json_line(record: Any) -> str:
    """A line of a JSONL file."""
    return as_json(record) + "\n"


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk."""
    sync(path, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """Flush a file, opened with ``flags``, to disk."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
