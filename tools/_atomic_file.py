"""Files that appear whole or not at all."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatron.errors import ConfigError, ResourceError


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
        if error.errno == errno.ENOSPC:
            raise ResourceError(f"{flag} {path}: the disk is full; free some space and run this again") from error
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror}); name another place") from error
    finally:
        temporary.unlink(missing_ok=True)
