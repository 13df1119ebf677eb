"""A cache of arrays on disk, for index maps and blends: one process builds them, all processes map them into memory."""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from filelock import FileLock

from megatron.common.errors import ResourceError
from megatron.common.files import replace_file
from megatron.config import DataConfig

Arrays = Mapping[str, np.ndarray]


class Recipe(Protocol):
    """What is needed to build some arrays, and known of them beforehand."""

    @property
    def names(self) -> Collection[str]:
        """Names of the arrays, which end the names of their files."""

    @property
    def nbytes(self) -> int:
        """Their size, at least."""

    def build(self) -> Arrays:
        """Build the arrays."""

    def fits(self, arrays: Arrays) -> bool:
        """Whether stored arrays have the shapes of those that ``build`` returns."""


def cached(folder: Path, name: str, recipe: Recipe) -> Arrays:
    """The arrays stored in ``folder`` under ``name``; they are built and stored if absent or broken.

    Any number of processes may call this at once: one builds while the others wait. Even without locks each file
    appears whole or not at all. If nothing can be written, the arrays stay in this process's memory.

    Args:
        name: must differ for arrays that differ.

    Raises:
        ResourceError: the disk is too small for the arrays; nothing is built.
    """
    with contextlib.suppress(OSError, ValueError):
        return _load(folder, name, recipe)
    with _lock(folder / f"{name}.lock"):
        with contextlib.suppress(OSError, ValueError):
            return _load(folder, name, recipe)
        _check_disk(folder, recipe.nbytes)
        arrays = recipe.build()
        with contextlib.suppress(OSError, ValueError):
            for key, array in arrays.items():
                with replace_file(folder / f"{name}_{key}.npy") as file:
                    np.save(file, array, allow_pickle=False)
            return _load(folder, name, recipe)
    return arrays


def cached_window(folder: Path, name: str, recipe: Recipe, *, first_epoch: int, epochs: int) -> Arrays:
    """The arrays of a window of ``epochs`` epochs of a stream, of which training reads one after the other.

    The first window, and those of a single epoch, which may be large, are ``cached``, which see. Others are built in
    less than a second, and stay in memory; so does a window for which the disk has become too small.
    """
    if not first_epoch:
        return cached(folder, name, recipe)
    if epochs == 1:
        with contextlib.suppress(ResourceError):
            return cached(folder, name, recipe)
    return recipe.build()


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
    """Map the stored arrays into memory. Raises OSError if one is absent, ValueError if one is broken."""
    # Unlike numpy.load this reads nothing but arrays of numbers: no archive, no pickle.
    maps = {key: np.lib.format.open_memmap(folder / f"{name}_{key}.npy", mode="r") for key in recipe.names}
    arrays = {key: np.asarray(memory) for key, memory in maps.items()}
    if not recipe.fits(arrays):
        raise ValueError(f"arrays {name} have other shapes")
    return arrays


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``.

    The kernel drops the lock of a killed process. Without write access, or on a file system without such locks, there
    is no lock: it only saves work.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A soft lock would outlive a killed process.
            stack.enter_context(FileLock(path, fallback_to_soft=False))
        yield
