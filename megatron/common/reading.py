"""Reading files whose names and contents come from users: what is no file is refused, never waited for."""

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def regular(path: str, flags: int) -> int:
    """An ``opener`` for ``open``. Raises OSError unless ``path`` is a file: a FIFO would block, a device never end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind in _KINDS:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{_KINDS[kind]}, not a file", path)
    return descriptor  # ``open`` refuses folders itself


def read_bytes(path: str | Path, *, largest: int | None = None) -> bytes:
    """The content of a file. Raises OSError if there is none, or one of more than ``largest`` bytes."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            raise OSError(errno.EFBIG, f"{size:,} bytes, more than the {largest:,} that such a file has", str(path))
        return file.read()


def read_json(path: str | Path) -> Any:
    """The value of a JSON file. Raises OSError as ``read_bytes``, and ValueError as ``parse_json``."""
    return parse_json(read_bytes(path))


def parse_json(text: str | bytes, **settings: Any) -> Any:
    """The value of a JSON text, by ``json.loads``. Raises ValueError, also for brackets that are nested too deep."""
    try:
        return json.loads(text, **settings)
    except RecursionError:
        raise ValueError("nested too deep") from None


def unreadable_words(words: Iterable[str]) -> list[str]:
    """A message for each word of a command line that is not UTF-8, such as the name of a file of another system."""
    wrong = [os.fsencode(word) for word in words if any("\udc80" <= letter <= "\udcff" for letter in word)]
    return [f"the argument {word!r} is not UTF-8: rename the file that it names" for word in wrong]
