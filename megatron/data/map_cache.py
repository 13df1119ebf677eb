"""A cache of arrays on disk, for index maps and blends: one process builds them, all processes map them into memory."""

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from filelock import FileLock

from megatron.config import DataConfig
from megatron.launch.files import replace_file

Arrays = Mapping[str, np.ndarray]


class Recipe(Protocol):
    """What is needed to build some arrays, and known of them beforehand."""

    @property
    def names(self) -> Collection[str]:
        """Names of the arrays, which end the names of their files."""

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
    """
    with contextlib.suppress(OSError, ValueError):
        return _load(folder, name, recipe)
    with _lock(folder / f"{name}.lock"):
        with contextlib.suppress(OSError, ValueError):
            return _load(folder, name, recipe)
        arrays = recipe.build()
        with contextlib.suppress(OSError, ValueError):
            for key, array in arrays.items():
                with replace_file(folder / f"{name}_{key}.npy") as file:
                    np.save(file, array, allow_pickle=False)
            return _load(folder, name, recipe)
    return arrays


def cache_folder(data: DataConfig, prefix: str) -> Path:
    """The cache of a data set: ``--data-cache-path``, or a folder beside the data set."""
    return Path(data.data_cache_path or Path(prefix).parent / "index-cache")


def digest(origin: object) -> str:
    """A short hash of everything that some arrays depend on."""
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


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
