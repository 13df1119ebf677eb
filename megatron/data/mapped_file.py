"""Maps files into memory without keeping file descriptors: a process may have 1,024, and a blend maps thousands."""

import ctypes
import errno
import io
import mmap
import os
import weakref
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from megatron.common.errors import ResourceError, first_line
from megatron.common.reading import regular

READ_AT_ONCE = 1 << 16
"""Smaller files, in bytes, are read instead of mapped."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: str | Path) -> np.ndarray:
    """The bytes of a file, uint8 [n], read-only: a large file is mapped, and read when its bytes are used.

    If this process may not map more files, the objects of ``register_closable`` are closed first. Raises OSError, and
    ResourceError if that is not enough.
    """
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size < READ_AT_ONCE:
            return np.frombuffer(file.read(), np.uint8)
        try:
            return np.asarray(_Mapping(file.fileno(), size, str(path)))
        except ResourceError:
            for close in [*_closables]:
                close.close()
            return np.asarray(_Mapping(file.fileno(), size, str(path)))


class Closable(Protocol):
    """An object with mapped files that it can map again."""

    def close(self) -> None:
        """Release the mapped files that are not in use."""


_closables: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def register_closable(owner: Closable) -> None:
    """Register an object whose files ``map_file`` closes when the process may not map more."""
    _closables.add(owner)


def parse_npy(content: np.ndarray) -> np.ndarray:
    """The array in the bytes of an .npy file, without a copy. Raises ValueError unless it is an array of numbers."""
    head = io.BytesIO(content[:_HEAD].tobytes())
    try:
        if np.lib.format.read_magic(head) != (1, 0):
            raise ValueError("an array of another version")
        shape, is_transposed, dtype = np.lib.format.read_array_header_1_0(head)
    except Exception as error:  # NumPy parses the header as Python, which fails in many ways
        raise ValueError(first_line(error)) from None
    if dtype.hasobject or is_transposed:
        raise ValueError(f"an array of {dtype} in another order" if is_transposed else "an array of objects")
    return content[head.tell() :].view(dtype).reshape(shape)


def write_npy(file: IO[bytes], array: np.ndarray) -> None:
    """Write an .npy file for ``parse_npy``. NumPy's ``save`` would not report that the last bytes cannot be written."""
    array = np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.data)


_HEAD = 4096
"""Bytes that contain the header of an .npy file."""


def prefetch(part: np.ndarray) -> np.ndarray:
    """Read ``part`` of a mapped file with one request and without the kernel's read-ahead, and return it."""
    before = (address := part.ctypes.data) % mmap.PAGESIZE
    _libc.madvise(address - before, before + part.nbytes, mmap.MADV_WILLNEED)
    return part


class _Mapping:
    """The memory mapping behind an array, unmapped with the last array. ``mmap.mmap`` would keep a file descriptor."""

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            if (code := ctypes.get_errno()) == errno.ENOMEM:
                raise ResourceError(
                    f"{path}: this process may not map more files (sysctl vm.max_map_count) or memory (ulimit -v): "
                    "raise that limit, or name fewer data sets"
                )
            raise OSError(code, os.strerror(code), path)
        self._unmap, self._region = _libc.munmap, (address, size)
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "_region"):
            self._unmap(*self._region)
