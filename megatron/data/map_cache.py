"""Index maps kept on disk: built by one process, mapped into memory by all of them."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np

from megatron.data.files import take_lock
from megatron.data.index_maps import IndexMaps, SampleStream, build_index_maps, map_shapes


def cached_maps(folder: Path, name: str, stream: SampleStream) -> IndexMaps:
    """The maps of ``stream`` stored in ``folder`` under ``name``; built and stored if they are absent or broken.

    ``name`` must tell apart whatever the stream is made of. Any number of processes may call this at
    once: one builds while the others wait, and even without locks each file appears whole or not at
    all. If nothing can be written, the maps stay in this process's memory.
    """
    with contextlib.suppress(OSError, ValueError):
        return _load(folder, name, stream)
    with _one_at_a_time(folder / f"{name}.lock"):
        with contextlib.suppress(OSError, ValueError):
            return _load(folder, name, stream)
        maps = build_index_maps(stream)
        with contextlib.suppress(OSError, ValueError):
            _store(folder, name, maps)
            return _load(folder, name, stream)
    return maps


def _paths(folder: Path, name: str) -> dict[str, Path]:
    """The file of each map."""
    return {field.name: folder / f"{name}_{field.name}.npy" for field in fields(IndexMaps)}


def _load(folder: Path, name: str, stream: SampleStream) -> IndexMaps:
    """Map the stored arrays into memory. OSError if one is absent, ValueError if one is broken."""
    # Unlike numpy.load this reads nothing but arrays of numbers: no archive, no pickle.
    arrays = {key: np.lib.format.open_memmap(path, mode="r") for key, path in _paths(folder, name).items()}
    if {key: array.shape for key, array in arrays.items()} != map_shapes(stream):
        raise ValueError(f"index maps {name} are of another size")
    return IndexMaps(**arrays)


def _store(folder: Path, name: str, maps: IndexMaps) -> None:
    """Write the arrays, each first under a name that nobody else uses."""
    for key, path in _paths(folder, name).items():
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb") as file:
                np.save(file, getattr(maps, key), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, where there can be one."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            take_lock(stack.enter_context(open(path, "ab")), wait=True)
        yield
