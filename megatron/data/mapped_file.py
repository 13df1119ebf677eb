"""Files mapped into memory without a file descriptor each: a process may have 1,024, and a blend maps thousands."""

import ctypes
import errno
import io
import mmap
import os
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron.common.errors import ResourceError, first_line
from megatron.common.reading import regular

READ_AT_ONCE = 1 << 16
"""Bytes of a file below which it is read instead."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def content_of(path: str | Path) -> np.ndarray:
    """The bytes of a file, uint8 [n], which cannot be written; those of a large one are read when they are used.

    If this process may not map more files, those that can be mapped again are closed first (``may_close``). Raises
    OSError, and ResourceError if that is not enough.
    """
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size < READ_AT_ONCE:
            return np.frombuffer(file.read(), np.uint8)
        try:
            return np.asarray(_Mapping(file.fileno(), size, str(path)))
        except ResourceError:
            for close in [*_closing]:
                close.close()
            return np.asarray(_Mapping(file.fileno(), size, str(path)))


class Closing(Protocol):
    """What has mapped files that it can map again."""

    def close(self) -> None:
        """Let go of them, but for those in use."""


_closing: "weakref.WeakSet[Closing]" = weakref.WeakSet()


def may_close(holder: Closing) -> None:
    """From now on, ``holder`` is told to close its files where a process may not map more."""
    _closing.add(holder)


def array_in(content: np.ndarray) -> np.ndarray:
    """The array in the bytes of a file of ``numpy.save``, not a copy. Raises ValueError if it is none of numbers."""
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


_HEAD = 4096
"""Bytes in which the shape of an array is."""


def read_whole(part: np.ndarray) -> np.ndarray:
    """``part`` of a mapped file, which the system reads with one request, and no megabytes around it."""
    before = (address := part.ctypes.data) % mmap.PAGESIZE
    _libc.madvise(address - before, before + part.nbytes, mmap.MADV_WILLNEED)
    return part


class _Mapping:
    """What an array refers to, until no array does. Python's own keeps a copy of the descriptor."""

    def __init__(self, descriptor: int, size: int, path: str) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            if (code := ctypes.get_errno()) == errno.ENOMEM:
                raise ResourceError(
                    f"{path}: this process may not map more files (sysctl vm.max_map_count) or memory (ulimit -v): "
                    "raise that limit, or name fewer data sets"
                )
            raise OSError(code, os.strerror(code), path)
        self._unmap, self._place = _libc.munmap, (address, size)
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "_place"):
            self._unmap(*self._place)
