"""The zip archive that ``torch.save`` writes, without its copies: every byte is hashed and written from its tensor.

torch computes CRC-32 in one thread, half as fast as zlib, and only then passes a tensor on. Here the thread that writes
computes it. The format is that of torch's C++ class ``PyTorchStreamWriter``: uncompressed records, whose data begin at
multiples of 64 bytes and whose CRC-32 follows them; sizes and offsets of 4 GiB and more as in zip64.
"""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron.checkpoint.files import Content

_ROOT = "archive"
"""The folder of all records, as torch names it in a file without a name."""
_LARGE, _MANY = 0xFFFFFFFF, 0xFFFF
"""What is as large or as many needs a field of zip64."""


class ArchiveFile(Protocol):
    """What an archive is written to: a ``megatron.checkpoint.files.NewFile``, or what does the same."""

    def write(self, data: Content | Callable[[], bytes], check: Callable[[memoryview], None] | None = None) -> None:
        """Append ``data``, or what a function returns when ``check`` has been called with all data before."""


class TensorArchive:
    """Takes the place of torch's writer in ``torch.serialization._save``, for a file that it fills from its beginning.

    The data of records must not change before the file is closed.
    """

    def __init__(self, file: ArchiveFile, alignment: int):
        self._file, self._alignment, self._offset = file, alignment, 0
        self._records: list[ZipRecord] = []

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Append a record: a string, bytes or a storage on the CPU."""
        record = ZipRecord(f"{_ROOT}/{name}".encode(), size, self._offset)
        header = record.header(self._alignment)
        self._file.write(header)
        if size:
            self._file.write(_bytes(data), record.update)
            self._file.write(record.descriptor)
        self._offset += len(header) + size + record.descriptor_size
        self._records.append(record)

    def finish(self) -> None:
        """Append torch's last records, and the directory."""
        self.write_record("version", "3\n", 2)
        identity = f"{zlib.crc32(b''.join(record.name for record in self._records)):020d}{self._offset:020d}"
        self.write_record(".data/serialization_id", identity, len(identity))
        self._file.write(self._directory)

    def _directory(self) -> bytes:
        entries = b"".join(record.entry() for record in self._records)
        count, size, begin = len(self._records), len(entries), self._offset
        end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 0x31E, 45, 0, 0, count, count, size, begin)
        locator = struct.pack("<IIQI", 0x07064B50, 0, begin + size, 1)
        counts, places = [min(count, _MANY)] * 2, [min(size, _LARGE), min(begin, _LARGE)]
        return entries + end64 + locator + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, *counts, *places, 0)


def _bytes(data: Any) -> memoryview:
    if isinstance(data, str):
        return memoryview(data.encode())
    if isinstance(data, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(data).numpy().data
    return memoryview(data)


@dataclass
class ZipRecord:
    """The bytes around the data of a record: its header, its descriptor, and its entry in the directory."""

    name: bytes
    size: int
    offset: int
    """Of its header."""
    crc: int = 0

    def update(self, piece: memoryview) -> None:
        """Add the next piece of the data to the CRC-32."""
        self.crc = zlib.crc32(piece, self.crc)

    def header(self, alignment: int) -> bytes:
        """What precedes the data, with padding up to the next multiple of ``alignment``."""
        numbers, without_padding = self._numbers(0), 30 + len(self.name) + 4  # torch writes 0 for one of the sizes here
        padding = -(self.offset + without_padding + len(numbers)) % alignment
        extra = numbers + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        fields = (0x04034B50, 0, self._flags, 0, 0, 0, 0, 0, 0, len(self.name), len(extra))
        return struct.pack("<IHHHHHIIIHH", *fields) + self.name + extra

    def descriptor(self) -> bytes:
        """What follows the data."""
        return struct.pack("<IIQQ" if self._numbers() else "<IIII", 0x08074B50, self.crc, self.size, self.size)

    @property
    def descriptor_size(self) -> int:
        """Its bytes; a record without data has none."""
        return (24 if self._numbers() else 16) if self.size else 0

    def entry(self) -> bytes:
        """The record in the directory."""
        numbers, size = self._numbers(), min(self.size, _LARGE)
        fields = (0x02014B50, 0, 0, self._flags, 0, 0, 0, self.crc, size, size, len(self.name), len(numbers))
        return (
            struct.pack("<IHHHHHHIIIHH", *fields)
            + struct.pack("<HHHII", 0, 0, 0, 0, min(self.offset, _LARGE))
            + self.name
            + numbers
        )

    @property
    def _flags(self) -> int:
        """The name is UTF-8; and the CRC-32 follows the data."""
        return 0x808 if self.size else 0x800

    def _numbers(self, stored: int | None = None) -> bytes:
        """The field of zip64: size, size as stored, and offset, as far as they are too large for 4 bytes."""
        sizes = [self.size, self.size if stored is None else stored] if self.size >= _LARGE else []
        numbers = sizes + [self.offset] * (self.offset >= _LARGE)
        return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
