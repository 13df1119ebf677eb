"""Files of text: lines that may be compressed with gzip, bzip2 or Zstandard, and rows of Parquet, a few at a time."""

import bz2
import gzip
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from megatron.common.errors import ConfigError, DataError

_BLOCK = 1 << 14
"""Compressed bytes taken at a time: what they hold may be very much more."""
_LARGEST_WINDOW = 1 << 31
"""As ``zstd --long=31`` writes it."""


def open_lines(path: Path) -> io.BufferedIOBase:
    """Open a file for reading, decompressed if it begins like gzip, bzip2 or Zstandard.

    Reading it raises OSError, EOFError if it is truncated, or ValueError if it is damaged. Raises ConfigError if a
    package is missing.
    """
    file = open(path, "rb")
    start = file.peek(10)
    for magic, opener in _OPENERS.items():
        if start.startswith(magic):
            return opener(file)
    return file


def _open_zstandard(file: BinaryIO) -> io.BufferedIOBase:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"{file.name} is compressed by Zstandard: pip install zstandard to read it") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
    return io.BufferedReader(_Frames(file, decompressor.decompressobj, zstandard.ZstdError), 1 << 16)


class _Frames(io.RawIOBase):
    """The content of consecutive Zstandard frames.

    The package's own reader takes a truncated file for a complete one.
    """

    def __init__(self, file: BinaryIO, new_frame: Callable[[], Any], error: type[Exception]) -> None:
        self._file, self._new_frame, self._error = file, new_frame, error
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(_BLOCK)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a Zstandard frame")
                return 0
            self._decompress()
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def _decompress(self) -> None:
        self._frame = self._frame or self._new_frame()
        try:
            self._ready = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            raise ValueError(str(error)) from error
        self._compressed = b""
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None

    def close(self) -> None:
        self._file.close()
        super().close()


_OPENERS: dict[bytes, Callable[[BinaryIO], io.BufferedIOBase]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file, mode="rb"),
    b"\x28\xb5\x2f\xfd": _open_zstandard,
    # Of bzip2 also the beginning of its first block: a text may well begin with "BZh".
    **{b"BZh%d1AY&SY" % level: lambda file: bz2.BZ2File(file) for level in range(1, 10)},
}
"""How compressed files are opened, by their first bytes."""


Row = tuple[bytes | None, ...]
"""The requested columns of a row, UTF-8; None for null."""

_ROWS = 16
"""Rows decoded at a time: documents may be long."""


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of ``columns``, in order.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: a column is missing, or holds no strings.
        OSError, ValueError: the file cannot be read, or is damaged.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{path} is a Parquet file: pip install pyarrow to read it") from None
    # Pages are read as they are needed, not row groups, which may be of any size.
    with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        _check_columns(path, file.schema_arrow, columns)
        for batch in file.iter_batches(_ROWS, columns=list(columns), use_threads=False):
            yield from zip(*(_cells(batch.column(name)) for name in columns), strict=True)


def _check_columns(path: Path, schema: Any, columns: Sequence[str]) -> None:
    import pyarrow

    for name in columns:
        if name not in schema.names:
            raise DataError(
                f'{path}: no column "{name}" (choose columns with --json-keys; there are {", ".join(schema.names)})'
            )
        kind = schema.field(name).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f'{path}: column "{name}" holds {kind}, where strings are needed')


def _cells(column: Any) -> list[bytes | None]:
    """As bytes: UTF-8 is decoded later, when the number of the row is known for messages."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_large = pyarrow.types.is_large_string(column.type)
    return column.cast(pyarrow.large_binary() if is_large else pyarrow.binary()).to_pylist()
