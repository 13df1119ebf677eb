"""Files of text that may be compressed by gzip, bzip2 or Zstandard."""

import bz2
import gzip
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megatron.common.errors import ConfigError

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
