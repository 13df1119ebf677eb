"""Reads files of users safely: rejects FIFOs, devices, and files or lines that are larger than a limit."""

import errno
import json
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from megatron.common.errors import ConfigError, one_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

_POINTER = b"version https://git-lfs."
_read = set[str]()


def was_read(path: Path) -> bool:
    """Whether this process has read the file ``path``."""
    return os.path.realpath(path) in _read


def regular(path: str, flags: int) -> int:
    """An ``opener`` for ``open`` that raises OSError for what is no regular file, and for Git LFS pointers.

    It does not wait, as for the writer of a FIFO.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise OSError(errno.EINVAL, "a socket or a device, not a file", path) from None
    _read.add(os.path.realpath(path))
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    problem = f"{_KINDS[kind]}, not a file" if kind in _KINDS else None
    if kind == stat.S_IFREG and os.pread(descriptor, len(_POINTER), 0) == _POINTER:
        problem = "a pointer of Git LFS, not the file itself: git lfs pull replaces it"
    if problem:
        os.close(descriptor)
        raise OSError(errno.EINVAL, problem, path)
    return descriptor  # ``open`` itself rejects folders


def check_regular(path: str | Path) -> None:
    """Raises OSError as ``regular``, for libraries that open files themselves."""
    with open(path, "rb", opener=regular):
        pass


def is_present(path: str | Path) -> bool:
    """Whether anything is at ``path``, also a FIFO or a broken link, which its reader refuses.

    Only an optional file that is not present may be taken as absent. Raises OSError if that cannot be known.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no path holds the character NUL
        return False
    return True


def check_archive(path: Path) -> None:
    """Check a file of torch. Raises OSError as ``regular``, and ValueError for a compressed zip archive."""
    with open(path, "rb", opener=regular) as file:
        if file.read(4) != b"PK\x03\x04":
            return
        with zipfile.ZipFile(file) as archive:
            content = sum(entry.file_size for entry in archive.infolist())
            is_compressed = any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist())
        if content > (size := os.fstat(file.fileno()).st_size):
            raise ValueError(f"its {size:,} bytes expand to {content:,}, and files of torch are not compressed")
        if is_compressed:
            raise ValueError("it is compressed, and files of torch are not")


LARGEST = 1 << 30
"""Maximum bytes of a file that is read at once."""
LARGEST_LINE = 1 << 28
"""Maximum bytes of a line, or of a row of a table."""


def read_lines(file: BinaryIO | BufferedIOBase) -> Iterator[bytes]:
    """The lines of an open file. Raises ValueError for a line of more than ``LARGEST_LINE`` bytes."""
    while line := file.readline(LARGEST_LINE + 1):
        if len(line) > LARGEST_LINE:
            raise ValueError(f"a line of more than {LARGEST_LINE:,} bytes")
        yield line


def read_bytes(path: str | Path, *, largest: int = LARGEST) -> bytes:
    """The content of a file. Raises OSError if it cannot be read or has more than ``largest`` bytes."""
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= largest and len(content := file.read(largest + 1)) <= largest:  # files of /proc say 0
            return content
        raise OSError(errno.EINVAL, f"more than the {largest:,} bytes that such a file has", str(path))


def read_text(path: str | Path, flag: str, *, largest: int = 1 << 18) -> str:
    """The text of a file that ``flag`` names, by default of settings, which are far smaller than ``largest`` bytes.

    Raises ConfigError if it cannot be read or is not UTF-8.
    """
    try:
        return read_bytes(path, largest=largest).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None


LARGEST_JSON = 1 << 27
"""Maximum bytes of a JSON file, such as a vocabulary or the index of a large model."""
LARGEST_SETTINGS = 1 << 24
"""Maximum bytes of a settings file."""
_DEPTH = 64


def read_json(path: str | Path, *, largest: int = LARGEST_JSON) -> Any:
    """The value of a JSON file. Raises OSError as ``read_bytes``, and ValueError as ``parse_json``."""
    return parse_json(read_bytes(path, largest=largest))


def parse_json(text: str | bytes, **settings: Any) -> Any:
    """The value of a JSON text, by ``json.loads``; bytes are UTF-8, as in every file that these programs read.

    Raises ValueError, also for brackets that are nested too deep, and as ``unique_keys`` unless ``settings`` have
    another ``object_pairs_hook``.
    """
    settings = {"object_pairs_hook": unique_keys, **settings}
    try:
        value = json.loads(text if isinstance(text, str) else str(text, "utf-8-sig"), **settings)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(_DEPTH):
        if not (level := [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list)]):
            return value
    raise ValueError("nested too deep")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a repeated key, of whose values all but the last would be lost."""
    if len(tree := dict(pairs)) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'the key "{one_line(key)[:40]}" occurs twice in an object')
    return tree


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def type_problem(kind: Any, value: Any) -> str | None:
    """Why ``value`` of a JSON file is not of the type ``kind``, without any conversion; None if it is."""
    from pydantic import ValidationError

    try:
        _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{step!r}]" for step in first["loc"] if step != "constrained-str")
        return f"{where} {first['msg']}".strip()
    return None


@cache
def _adapter(kind: Any) -> "TypeAdapter":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def unreadable_arguments(arguments: Iterable[str]) -> list[str]:
    """A message for each command-line argument that is not UTF-8, such as a file name of another system."""
    wrong = [os.fsencode(text) for text in arguments if any("\udc80" <= letter <= "\udcff" for letter in text)]
    return [
        f"the argument {argument!r} is not UTF-8: rename the file that it names"
        if "\ufffd" in (text := argument.decode(errors="replace"))
        else f"the argument {text!a} cannot be read in this locale: set LC_ALL=C.UTF-8 or PYTHONUTF8=1"
        for argument in wrong
    ]
