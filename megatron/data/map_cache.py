"""Index maps, and orders of blends, kept on disk: built by one process, mapped into memory by all of them."""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from filelock import FileLock

from megatron.config import DataConfig
from megatron.data.blend import BlendOrder, BlendPlan, build_order, order_shapes
from megatron.data.index_maps import IndexMaps, SampleStream, SentenceMaps, SentenceStream, build_index_maps, map_shapes
from megatron.launch.files import replace_file

Arrays = Mapping[str, np.ndarray]


class Expected(Protocol):
    """What is known of arrays without building them."""

    names: Collection[str]

    def fit(self, arrays: Arrays) -> bool:
        """Whether stored ones can be those."""


def cached_maps(folder: Path, name: str, stream: SampleStream) -> IndexMaps:
    """The maps of ``stream`` stored in ``folder`` under ``name``, which must tell apart whatever it is made of."""
    return IndexMaps(**_cached(folder, name, _Shapes(map_shapes(stream)), lambda: vars(build_index_maps(stream))))


def cached_sentence_maps(folder: Path, name: str, stream: SentenceStream) -> SentenceMaps:
    """The maps of a stream of sentences, kept likewise."""
    return SentenceMaps(**_cached(folder, name, stream, lambda: vars(stream.build())))


def cached_order(folder: Path, name: str, plan: BlendPlan) -> BlendOrder:
    """The order of a blend, kept likewise."""
    return BlendOrder(plan, **_cached(folder, name, _Shapes(order_shapes(plan)), lambda: build_order(plan)))


def _cached(folder: Path, name: str, expected: Expected, build: Callable[[], Arrays]) -> Arrays:
    """The arrays stored in ``folder`` under ``name``; built and stored if they are absent or broken.

    Any number of processes may call this at once: one builds while the others wait, and even without
    locks each file appears whole or not at all. If nothing can be written, the arrays stay in this
    process's memory.
    """
    with contextlib.suppress(OSError, ValueError):
        return _load(folder, name, expected)
    with _one_at_a_time(folder / f"{name}.lock"):
        with contextlib.suppress(OSError, ValueError):
            return _load(folder, name, expected)
        arrays = build()
        with contextlib.suppress(OSError, ValueError):
            _store(folder, name, arrays)
            return _load(folder, name, expected)
    return arrays


def cache_folder(data: DataConfig, prefix: str) -> Path:
    """Where the maps of a data set are kept: ``--data-cache-path``, or beside it."""
    return Path(data.data_cache_path or Path(prefix).parent / "index-cache")


def digest(origin: object) -> str:
    """What tells maps by all that they depend on."""
    return hashlib.sha256(repr(origin).encode()).hexdigest()[:16]


class _Shapes:
    """Arrays whose shapes are known."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.names, self._shapes = shapes.keys(), shapes

    def fit(self, arrays: Arrays) -> bool:
        return {key: array.shape for key, array in arrays.items()} == self._shapes


def _path(folder: Path, name: str, key: str) -> Path:
    """The file of an array."""
    return folder / f"{name}_{key}.npy"


def _load(folder: Path, name: str, expected: Expected) -> Arrays:
    """Map the stored arrays into memory. OSError if one is absent, ValueError if one is broken."""
    # Unlike numpy.load this reads nothing but arrays of numbers: no archive, no pickle.
    arrays = {key: np.asarray(np.lib.format.open_memmap(_path(folder, name, key), mode="r")) for key in expected.names}
    if not expected.fit(arrays):
        raise ValueError(f"arrays {name} are of another size")
    return arrays


def _store(folder: Path, name: str, arrays: Arrays) -> None:
    """Write the arrays. Raises OSError if one cannot be written."""
    for key, array in arrays.items():
        with replace_file(_path(folder, name, key)) as file:
            np.save(file, array, allow_pickle=False)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``.

    The kernel drops the lock of a killed process. If the folder cannot be written, or its file system has no such
    locks, there is none: it only saves work.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            # A soft lock would outlive a killed process.
            stack.enter_context(FileLock(path, fallback_to_soft=False))
        yield
