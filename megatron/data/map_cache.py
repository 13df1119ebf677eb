"""Index maps kept on disk: built by one process, mapped into memory by all of them."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from megatron.data.files import take_lock

Maps = TypeVar("Maps")


class Stream(Protocol[Maps]):
    """What maps are made from."""

    maps: type[Maps]
    """A dataclass of arrays."""

    def build(self) -> Maps:
        """Compute them."""

    def fits(self, maps: Maps) -> bool:
        """Whether stored ones have the shapes of this stream."""


def cached_maps(folder: Path, name: str, stream: Stream[Maps]) -> Maps:
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
        maps = stream.build()
        with contextlib.suppress(OSError, ValueError):
            _store(_paths(folder, name, stream), maps)
            return _load(folder, name, stream)
    return maps


def _paths(folder: Path, name: str, stream: Stream[Maps]) -> dict[str, Path]:
    """The file of each map."""
    return {field.name: folder / f"{name}_{field.name}.npy" for field in fields(stream.maps)}


def _load(folder: Path, name: str, stream: Stream[Maps]) -> Maps:
    """Map the stored arrays into memory. OSError if one is absent, ValueError if one is broken."""
    # Unlike numpy.load this reads nothing but arrays of numbers: no archive, no pickle.
    paths = _paths(folder, name, stream)
    maps = stream.maps(**{key: np.lib.format.open_memmap(path, mode="r") for key, path in paths.items()})
    if not stream.fits(maps):
        raise ValueError(f"index maps {name} are of another size")
    return maps


def _store(paths: Mapping[str, Path], maps: Maps) -> None:
    """Write the arrays, each first under a name that nobody else uses."""
    for key, path in paths.items():
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
