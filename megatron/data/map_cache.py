"""An on-disk cache of index maps and blends: one process builds the arrays, all processes map them into memory."""

import contextlib
import glob
import hashlib
import json
import math
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from filelock import FileLock

from megatron.common.errors import ResourceError
from megatron.common.files import UNFINISHED, replace_file, sync
from megatron.common.reading import read_json
from megatron.config import DataConfig
from megatron.data.mapped_file import map_file, parse_npy, write_npy

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]


LARGE = 1 << 24
"""Bytes from which on the arrays of an epoch are stored; smaller ones are built in less than a second."""
CHECKED_ONCE = 1 << 16
"""Bytes from which on a check of arrays or of an index is recorded; every process checks smaller ones."""
Make = Callable[[str], np.ndarray]
"""Allocates an array of the ``Form`` of this name; its content is undefined."""


class Form(NamedTuple):
    """Type, shape and bounds of a stored array of non-negative integers."""

    dtype: type[np.integer]
    shape: tuple[int, ...]
    """-1 for a length that is not known before the array is built."""
    ends: int | tuple[int, ...]
    """Exclusive upper bound of the numbers, or one for each column."""
    covers: bool = False
    """Whether the array contains every number below ``ends``."""


class Recipe(NamedTuple):
    """How to build and check a set of arrays."""

    forms: Mapping[str, Form]
    """The form of each array, by its name, which is also the suffix of its file name."""
    nbytes: int
    """Minimum size of all arrays."""
    build: Callable[[Make], Arrays]
    """Returns the arrays. Those that it allocates with ``Make`` are written directly to files."""
    fits: Callable[[Arrays], bool] = lambda arrays: True
    """Whether stored arrays of these forms are consistent with each other."""


def cached(folder: Path, name: str, recipe: Recipe) -> Arrays:
    """The arrays stored in ``folder`` under ``name``; they are built and stored if absent or invalid.

    Any number of processes may call this at once: one builds while the others wait. Files are replaced atomically, also
    where locks do not work. If nothing can be written, the arrays stay in this process's memory. Raises ResourceError,
    before anything is built, if the disk has too little space.
    """
    with contextlib.suppress(OSError, ValueError):
        return _load(folder, name, recipe)
    with _lock(folder / f"{name}.lock") as is_locked:
        with contextlib.suppress(OSError, ValueError):
            return _load(folder, name, recipe)
        if is_locked and recipe.nbytes >= LARGE:
            _remove_unfinished(folder, name)
        _check_disk(folder, recipe.nbytes)
        with _new_files(folder, name, recipe) as (make, store):
            arrays = recipe.build(make)
            with contextlib.suppress(OSError, ValueError):
                store(arrays)
                return _load(folder, name, recipe)
    return arrays


@contextlib.contextmanager
def _new_files(folder: Path, name: str, recipe: Recipe) -> Iterator[tuple[Make, Callable[[Arrays], None]]]:
    """Yield a function that allocates arrays in unfinished files, or in memory, and a function that stores arrays."""
    unfinished: dict[str, Path] = {}

    def make(key: str) -> np.ndarray:
        form, path = recipe.forms[key], folder / f".{name}_{key}.{os.urandom(4).hex()}{UNFINISHED}"
        unfinished[key] = path
        try:
            array = np.lib.format.open_memmap(path, "w+", form.dtype, form.shape)
            with open(path, "r+b") as file:  # a full disk raises an error here, but SIGBUS later
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            return np.asarray(array)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.pop(key).unlink()
            return in_memory(recipe, key)

    def store(arrays: Arrays) -> None:
        # Small arrays are not flushed: they are checked when read, and a blend has thousands.
        durable = 2 * sum(array.nbytes for array in arrays.values()) >= CHECKED_ONCE  # files have headers
        for key, array in arrays.items():
            path = folder / f"{name}_{key}.npy"
            if key in unfinished:
                if durable:
                    sync(unfinished[key])
                os.replace(unfinished[key], path)
            else:
                with replace_file(path, durable=durable) as file:
                    write_npy(file, array)
        _record(folder, name, recipe)

    try:
        yield make, store
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def _remove_unfinished(folder: Path, name: str) -> None:
    """Remove the large files of a process that was killed while it built these arrays.

    Files that were written in the last hour stay: if locks do not work across hosts, another host may be writing them.
    """
    for path in folder.glob(f".{glob.escape(name)}_*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


def _identities(folder: Path, name: str, recipe: Recipe) -> dict[str, list[int]]:
    """Size and modification time of the file of each array. Raises OSError if one is absent."""
    stats = {key: (folder / f"{name}_{key}.npy").stat() for key in recipe.forms}
    return {key: [stat.st_size, stat.st_mtime_ns] for key, stat in stats.items()}


def _record(folder: Path, name: str, recipe: Recipe) -> None:
    """Record that the stored arrays were checked, so that other processes need not check them."""
    identities = _identities(folder, name, recipe)
    file = folder / f"{name}_checked.json"
    if sum(size for size, _ in identities.values()) >= CHECKED_ONCE:
        with contextlib.suppress(OSError), replace_file(file, text=True, durable=False) as record:
            json.dump(identities, record)


def is_recorded(folder: Path, name: str, recipe: Recipe) -> bool:
    """Whether the arrays are stored and unchanged since their check."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder / f"{name}_checked.json") == _identities(folder, name, recipe)
    return False


def cached_epoch(folder: Path, name: str, recipe: Recipe, epoch: int) -> Arrays:
    """The arrays of one of the epochs that training reads in order.

    The first epoch and large ones are ``cached``; others stay in memory, also if the disk has become too full for a
    later epoch.
    """
    if epoch == 0:
        return cached(folder, name, recipe)
    if recipe.nbytes >= LARGE:
        with contextlib.suppress(ResourceError):
            return cached(folder, name, recipe)
    return recipe.build(partial(in_memory, recipe))


def cached_numbers(
    folder: Path, name: str, key: str, dtype: type[np.integer], count: int, find: Callable[[], Sequence[int]]
) -> np.ndarray:
    """The ``count`` numbers that ``find`` computes, ``cached`` as an array."""
    form = Form(dtype, (count,), int(np.iinfo(dtype).max) + 1)
    recipe = Recipe({key: form}, count * np.dtype(dtype).itemsize, lambda _: {key: np.array(find(), dtype)})
    return cached(folder, name, recipe)[key]


def in_memory(recipe: Recipe, key: str) -> np.ndarray:
    """Allocate an array of the ``Form`` of this name in memory that forked processes share."""
    form = recipe.forms[key]
    size = math.prod(form.shape) * np.dtype(form.dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), form.dtype, math.prod(form.shape)).reshape(form.shape)


def from_random_start(items: Sequence[T]) -> list[T]:
    """``items``, rotated to a random start, so that concurrent processes build different items first."""
    first = secrets.randbelow(len(items))
    return [*items[first:], *items[:first]]


def cache_folder(data: DataConfig, prefix: str) -> Path:
    """The cache folder of a data set: ``--data-cache-path``, or a folder next to the data set."""
    return Path(data.data_cache_path or Path(prefix).parent / "index-cache")


def digest(origin: object) -> str:
    """A short hash of ``origin``, everything on which some arrays depend."""
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def _check_disk(folder: Path, size: int) -> None:
    """Raises ResourceError if ``folder`` is writable but has less than ``size`` bytes of free space."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ResourceError(
            f"{folder}: the index maps need {size:,} bytes, and the disk has {free:,} free: free some space, or name a "
            "folder on another disk with --data-cache-path"
        )


def _load(folder: Path, name: str, recipe: Recipe) -> Arrays:
    """Map the stored arrays into memory. Raises OSError if one is absent, ValueError if one contradicts ``recipe``."""
    arrays, is_checked = {}, is_recorded(folder, name, recipe)
    for key, form in recipe.forms.items():
        path = folder / f"{name}_{key}.npy"
        arrays[key] = array = parse_npy(map_file(path))
        shape = tuple(stored if size == -1 else size for size, stored in zip(form.shape, array.shape, strict=True))
        if (array.dtype, array.shape) != (form.dtype, shape):
            raise ValueError(f"{path} is not of {form}")
        if is_checked:
            continue
        if array.size and (array.min() < 0 or (array.max(axis=0) >= form.ends).any()):
            raise ValueError(f"{path} has numbers beyond those of {form}")
        if form.covers and not _covers(array, int(np.max(form.ends))):
            raise ValueError(f"{path} lacks numbers of {form}")
    if not is_checked:
        if not recipe.fits(arrays):
            raise ValueError(f"{folder / name}: the arrays do not fit together")
        _record(folder, name, recipe)
    return arrays


ROWS = 1 << 20
"""Rows of an array that are built or checked at a time, so that they fit into the CPU's caches."""
_NUMBERS_AT_ONCE = 1 << 28
"""Numbers that one pass over an array looks for."""


def _covers(array: np.ndarray, end: int) -> bool:
    """Whether all numbers below ``end`` are in ``array``, [n]."""
    for first in range(0, end, _NUMBERS_AT_ONCE):
        seen = np.zeros(min(_NUMBERS_AT_ONCE, end - first), np.bool_)
        for begin in range(0, len(array), ROWS):
            rows = array[begin : begin + ROWS]
            seen[rows[(rows >= first) & (rows < first + _NUMBERS_AT_ONCE)] - first] = True
        if not seen.all():
            return False
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock file ``path``; yields whether it is held.

    The kernel drops the lock of a killed process. Without write access, or on a file system without locks, it
    is not held: the lock only avoids that several processes build the same arrays.
    """
    with contextlib.ExitStack() as stack:
        is_locked = False
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A soft lock would outlive a killed process.
            stack.enter_context(FileLock(path, fallback_to_soft=False))
            is_locked = True
        yield is_locked
