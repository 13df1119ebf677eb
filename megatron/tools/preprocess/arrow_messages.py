"""Sizes of Arrow's record batches before they are expanded: pyarrow expands a batch as a whole, however large it is.

The description of a batch is a flatbuffer, whose format pyarrow checks and does not show.
"""

import struct
from typing import Any

_COMPRESSION_OF_ARROW_0_17 = b"ARROW:experimental_compression"


def expanded_size(file: Any) -> int:
    """Bytes to which the compressed buffers of an open stream of Arrow expand, as they say themselves.

    Raises OSError or ValueError if it is damaged.
    """
    import pyarrow.ipc

    return sum(map(_size, pyarrow.ipc.MessageReader.open_stream(file)))


def _size(message: Any) -> int:
    if message.type not in ("record batch", "dictionary"):
        return 0
    data, body = message.metadata.to_pybytes(), memoryview(message.body)
    try:
        batch = _target(data, _field(data, _target(data, 0), 2))
        if message.type == "dictionary":
            batch = _target(data, _field(data, batch, 1))
        if not _field(data, batch, 3) and _COMPRESSION_OF_ARROW_0_17 not in data:
            return 0
        if not (field := _field(data, batch, 2)):
            return 0
        buffers = _target(data, field)
        (count,) = struct.unpack_from("<I", data, buffers)
        places = struct.iter_unpack("<qq", data[buffers + 4 : buffers + 4 + 16 * count])
        return sum(max(0, *struct.unpack_from("<q", body, offset)) for offset, length in places if length >= 8)
    except struct.error:
        raise ValueError("a batch is damaged") from None


def _field(data: bytes, table: int, number: int) -> int:
    """The place of a field of a table; 0 if it is absent."""
    fields = table - struct.unpack_from("<i", data, table)[0]
    entry, (size,) = 4 + 2 * number, struct.unpack_from("<H", data, fields)
    (offset,) = struct.unpack_from("<H", data, fields + entry) if entry < size else (0,)
    return table + offset if offset else 0


def _target(data: bytes, place: int) -> int:
    """The place to which a reference points."""
    return place + struct.unpack_from("<I", data, place)[0]
