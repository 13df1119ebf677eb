"""A cache of arrays on disk, for index maps and blends: one process builds them, all processes map them into memory."""

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
from megatron.data.mapped_file import array_in, content_of

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]


LARGE = 1 << 24
"""Bytes of the arrays of an epoch, from which on they are stored. It takes less than a second to build smaller ones."""
CHECKED_ONCE = 1 << 16
"""Bytes of arrays, or of an index, from which on it is recorded that they were checked; others always are."""
Make = Callable[[str], np.ndarray]
"""Returns a new array of the ``Form`` of this name, whose content is arbitrary."""


class Form(NamedTuple):
    """What a stored array must be. None of its numbers is negative."""

    dtype: type[np.integer]
    shape: tuple[int, ...]
    """-1 for a length that only the content decides."""
    ends: int | tuple[int, ...]
    """What the numbers are below, or those of each column."""
    covers: bool = False
    """Whether every number below ``ends`` is there."""


class Recipe(NamedTuple):
    """What is needed to build some arrays."""

    forms: Mapping[str, Form]
    """Of the arrays by name, which ends the names of their files."""
    nbytes: int
    """Their size, at least."""
    build: Callable[[Make], Arrays]
    """Returns the arrays, some of which it may have from ``Make``, which are in files then, not in memory."""
    fits: Callable[[Arrays], bool] = lambda arrays: True
    """Whether stored arrays of these forms fit together."""


def cached(folder: Path, name: str, recipe: Recipe) -> Arrays:
    """The arrays stored in ``folder`` under ``name``; they are built and stored if absent or not what the recipe says.

    Any number of processes may call this at once: one builds while the others wait. Even without locks each file
    appears whole or not at all. If nothing can be written, the arrays stay in this process's memory.

    Args:
        name: must differ for arrays that differ.

    Raises:
        ResourceError: the disk is too small for the arrays; nothing is built.
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
    """What makes arrays in unfinished files, and what stores them. Without a folder to write they are in memory."""
    unfinished: dict[str, Path] = {}

    def make(key: str) -> np.ndarray:
        form, path = recipe.forms[key], folder / f".{name}_{key}.{os.urandom(4).hex()}{UNFINISHED}"
        with contextlib.suppress(OSError):
            array = np.lib.format.open_memmap(path, "w+", form.dtype, form.shape)
            unfinished[key] = path
            with open(path, "r+b") as file:  # a full disk is an error here, and a signal later
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            return np.asarray(array)
        return in_memory(recipe, key)

    def store(arrays: Arrays) -> None:
        # Of those that are always checked the system may lose some, and a blend has thousands.
        durable = 2 * sum(array.nbytes for array in arrays.values()) >= CHECKED_ONCE  # files have headers
        for key, array in arrays.items():
            path = folder / f"{name}_{key}.npy"
            if key in unfinished:
                if durable:
                    sync(unfinished[key])
                os.replace(unfinished[key], path)
            else:
                with replace_file(path, durable=durable) as file:
                    np.save(file, array, allow_pickle=False)
        _record(folder, name, recipe)

    try:
        yield make, store
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def _remove_unfinished(folder: Path, name: str) -> None:
    """Remove the large files of a process that was killed while it built these arrays.

    Not what was written to within an hour: where locks do not reach other hosts, they may build the same.
    """
    for path in folder.glob(f".{glob.escape(name)}_*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()


def _identities(folder: Path, name: str, recipe: Recipe) -> dict[str, list[int]]:
    """Sizes and times of the files of arrays. Raises OSError if one is absent."""
    stats = {key: (folder / f"{name}_{key}.npy").stat() for key in recipe.forms}
    return {key: [stat.st_size, stat.st_mtime_ns] for key, stat in stats.items()}


def _record(folder: Path, name: str, recipe: Recipe) -> None:
    """Record that the stored arrays are right, so that not every process has to check them."""
    identities = _identities(folder, name, recipe)
    file = folder / f"{name}_checked.json"
    if sum(size for size, _ in identities.values()) >= CHECKED_ONCE:
        with contextlib.suppress(OSError), replace_file(file, text=True, durable=False) as record:
            json.dump(identities, record)


def is_recorded(folder: Path, name: str, recipe: Recipe) -> bool:
    """Whether the arrays are stored, and were right when they were."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder / f"{name}_checked.json") == _identities(folder, name, recipe)
    return False


def cached_epoch(folder: Path, name: str, recipe: Recipe, epoch: int) -> Arrays:
    """The arrays of an epoch, of which training reads one after the other.

    The first one and large ones are ``cached``, which see; others stay in memory, and so does a later one for which the
    disk has become too small.
    """
    if epoch == 0:
        return cached(folder, name, recipe)
    if recipe.nbytes >= LARGE:
        with contextlib.suppress(ResourceError):
            return cached(folder, name, recipe)
    return recipe.build(partial(in_memory, recipe))


def found_once(
    folder: Path, name: str, key: str, dtype: type[np.integer], count: int, find: Callable[[], Sequence[int]]
) -> np.ndarray:
    """The ``count`` numbers that ``find`` returns, as an array that is ``cached``."""
    form = Form(dtype, (count,), int(np.iinfo(dtype).max) + 1)
    recipe = Recipe({key: form}, count * np.dtype(dtype).itemsize, lambda _: {key: np.array(find(), dtype)})
    return cached(folder, name, recipe)[key]


def in_memory(recipe: Recipe, key: str) -> np.ndarray:
    """A new array of the ``Form`` of this name, which processes that are forked from this one can write."""
    form = recipe.forms[key]
    size = math.prod(form.shape) * np.dtype(form.dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), form.dtype, math.prod(form.shape)).reshape(form.shape)


def from_anywhere(items: Sequence[T]) -> list[T]:
    """``items`` from a random one on, then those before: several processes that build what is absent divide it."""
    first = secrets.randbelow(len(items))
    return [*items[first:], *items[:first]]


def cache_folder(data: DataConfig, prefix: str) -> Path:
    """The cache of a data set: ``--data-cache-path``, or a folder beside the data set."""
    return Path(data.data_cache_path or Path(prefix).parent / "index-cache")


def digest(origin: object) -> str:
    """A short hash of everything that some arrays depend on."""
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


def _check_disk(folder: Path, size: int) -> None:
    """Raises ResourceError if ``size`` bytes can be written to ``folder`` but for the space."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ResourceError(
            f"{folder}: the index maps need {size:,} bytes, and the disk has {free:,} free: free some space, or name a "
            "folder on another disk with --data-cache-path"
        )


def _load(folder: Path, name: str, recipe: Recipe) -> Arrays:
    """Map the stored arrays into memory. Raises OSError if one is absent, ValueError unless it fits ``recipe``."""
    arrays, is_checked = {}, is_recorded(folder, name, recipe)
    for key, form in recipe.forms.items():
        path = folder / f"{name}_{key}.npy"
        arrays[key] = array = array_in(content_of(path))
        shape = tuple(found if size == -1 else size for size, found in zip(form.shape, array.shape, strict=True))
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
"""Rows of an array that are built or checked at a time: they stay in a cache of the processor."""
_SEEN = 1 << 28
"""Numbers that are looked for in one pass over an array."""


def _covers(array: np.ndarray, end: int) -> bool:
    """Whether all numbers below ``end`` are in ``array``, [n]."""
    for first in range(0, end, _SEEN):
        seen = np.zeros(min(_SEEN, end - first), np.bool_)
        for begin in range(0, len(array), ROWS):
            found = array[begin : begin + ROWS]
            seen[found[(found >= first) & (found < first + _SEEN)] - first] = True
        if not seen.all():
            return False
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock file ``path``; false if there is none.

    The kernel drops the lock of a killed process. Without write access, or on a file system without such locks, there
    is no lock: it only saves work.
    """
    with contextlib.ExitStack() as stack:
        is_locked = False
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A soft lock would outlive a killed process.
            stack.enter_context(FileLock(path, fallback_to_soft=False))
            is_locked = True
        yield is_locked
