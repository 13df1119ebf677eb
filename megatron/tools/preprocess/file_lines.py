"""Reads lines of text files, optionally compressed with gzip, bzip2 or Zstandard, and detects file formats."""

import bz2
import codecs
import errno
import gzip
import io
import os
import select
import stat
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from megatron.common.errors import ConfigError, DataError
from megatron.common.reading import LARGEST, read_lines, regular

FORMATS_BY_ENDING = {".jsonl": "jsonl", ".json": "jsonl", ".txt": "text", ".parquet": "parquet", ".arrow": "arrow"}
"""Formats by file suffix."""
_TABLES = (".csv", ".tsv")
"""Suffixes of tables, which are not supported."""
COMPRESSED = (".gz", ".bz2", ".zst")
"""Suffixes of compressed files."""
_BLOCK = 1 << 12
"""Compressed bytes that are decompressed at a time: the result may be far larger."""
MOST_EXPANDED = 500
"""Maximum factor by which a compressed text file may expand; a larger file is rejected."""
MOST_EMPTY = 1 << 17
"""Maximum number of consecutive empty lines: a small compressed file may contain billions."""
_TAR_MAGIC = slice(257, 262)
"""Bytes of the magic "ustar" in a tar archive."""
_LARGEST_WINDOW = 1 << 31
"""Maximum window size of Zstandard, which ``zstd --long=31`` uses."""


class _ZstandardFrames(io.RawIOBase):
    """Decompresses consecutive Zstandard frames. The package's own reader does not detect truncated files."""

    def __init__(self, file: BinaryIO) -> None:
        """Raises ConfigError if the package is missing."""
        try:
            import zstandard
        except ImportError:
            raise ConfigError(f"{file.name} is compressed by Zstandard: pip install zstandard to read it") from None
        self._file, self._library = file, zstandard
        self._frame: Any = None
        self._compressed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and (compressed := self._compressed or self._file.read(_BLOCK)):
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            try:
                self._ready, self._compressed = memoryview(self._frame.decompress(compressed)), b""
            except self._library.ZstdError as error:
                raise ValueError(str(error)) from error
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        if not self._ready and self._frame is not None:
            raise EOFError("it ends in the middle of a Zstandard frame")
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def close(self) -> None:
        self._file.close()
        super().close()


_OPENERS: dict[bytes, Callable[[BinaryIO], io.BufferedIOBase]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    b"\x28\xb5\x2f\xfd": lambda file: io.BufferedReader(_ZstandardFrames(file), 1 << 16),
    # For bzip2 including the magic of its first block: a text may begin with "BZh".
    **{b"BZh%d1AY&SY" % level: lambda file: bz2.BZ2File(file) for level in range(1, 10)},
}
"""Functions that open compressed files, by the files' first bytes."""


PATIENCE, PATIENCE_FOR_WRITER = 60.0, 5.0
"""Seconds to wait for the first byte of a pipe, with and without a process that has opened it for writing."""


def regular_or_pipe(path: str, flags: int) -> int:
    """An ``opener`` for files and pipes, such as bash's ``<(…)``. Raises OSError as ``regular``, and for idle pipes."""
    if not stat.S_ISFIFO(os.stat(path).st_mode):
        return regular(path, flags)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(PATIENCE_FOR_WRITER * 1000):
        waited = PATIENCE_FOR_WRITER
        try:
            os.read(descriptor, 1)
        except BlockingIOError:  # there is a writer
            waited = PATIENCE
        if waited == PATIENCE_FOR_WRITER or not poll.poll((PATIENCE - PATIENCE_FOR_WRITER) * 1000):
            os.close(descriptor)
            raise OSError(errno.EINVAL, f"a FIFO into which nothing was written in {waited:g} s", path)
    os.set_blocking(descriptor, True)
    return descriptor


def file_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, decompressed. Raises ValueError, EOFError or OSError if it is damaged, cut or empty."""
    file = open(path, "rb", opener=regular_or_pipe)
    start = file.peek(10)
    opener = next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)
    is_counted = opener is not None and path.is_file()
    total, empty, most = 0, 0, max(LARGEST, MOST_EXPANDED * os.fstat(file.fileno()).st_size)
    with opener(file) if opener else file as lines:
        for line in read_lines(lines):
            if not total and line[_TAR_MAGIC] == b"ustar":
                raise ValueError("a tar archive: unpack it, and name the files in it")
            total += len(line)
            empty = 0 if len(line) > 2 else empty + (not line.strip())
            if empty > MOST_EMPTY:
                raise ValueError(f"more than {MOST_EMPTY:,} empty lines in a row")
            if is_counted and total > most:
                raise ValueError(f"it expands to more than {MOST_EXPANDED} times its size")
            yield line


def format_of(path: Path) -> str:
    """The format of a file: by its suffix, without the suffix of its compression, else by its first character.

    Raises DataError for tables such as CSV, whose lines are not documents.
    """
    if uncompressed(path).suffix in _TABLES:
        raise DataError(
            f"{path} is a table: write its text as JSONL or Parquet, or add --input-format text if a line is a document"
        )
    return FORMATS_BY_ENDING.get(uncompressed(path).suffix) or _format_of_content(path)


@cache
def _format_of_content(path: Path) -> str:
    """The format by content: JSONL if the file begins like JSON, else text; JSONL for pipes, which cannot be reread."""
    if not path.is_file():
        return "jsonl"
    try:
        start = next(filter(None, (line.removeprefix(codecs.BOM_UTF8).strip() for line in file_lines(path))), b"")
    except (OSError, EOFError, ValueError, zlib.error):  # reported when the file is read
        return "jsonl"
    return "jsonl" if start.startswith((b"{", b"[")) else "text"


def uncompressed(path: Path) -> Path:
    """The name of a file without the suffix of its compression."""
    return path.with_suffix("") if path.suffix in COMPRESSED else path
