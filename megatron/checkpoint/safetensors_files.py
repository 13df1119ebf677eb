"""Reads headers of safetensors files, single or sharded with an index: names, types and shapes. No torch here."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import safetensors

from megatron.common.errors import CheckpointError, first_line
from megatron.common.reading import LARGEST_SETTINGS, is_present, parse_json, regular
from megatron.model.huggingface import read_json

SAFETENSORS = "model.safetensors"
INDEX_SUFFIX = ".index.json"
T = TypeVar("T")
FLOATS = ("F64", "F32", "BF16", "F16")
"""Supported types of weights, by their names in the format."""


class Entry(NamedTuple):
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """Name of the type in the format, such as ``BF16``."""


def read_entries(path: Path) -> dict[str, Entry]:
    """The tensors by name in a file, in the files of an index, or in a folder with either.

    Raises CheckpointError if a file is missing or damaged.
    """
    return contents(path, _entries_of, SAFETENSORS)


def contents(path: Path, read: Callable[[Path], Mapping[str, T]], *names: str) -> dict[str, T]:
    """What ``read`` returns for all files of ``files_with``, together.

    Raises CheckpointError if a file lacks a tensor that the index has there, or two files have the same tensor.
    """
    found: dict[str, T] = {}
    for file, indexed in files_with(path, *names).items():
        tensors = read(file)
        for name in sorted(indexed - tensors.keys()):
            raise CheckpointError(f"{file} holds no {name}, which the index says it does: copy both files again")
        for name in sorted(found.keys() & tensors.keys()):
            raise CheckpointError(f"{file} holds {name}, and so does another file of the index: copy all of them again")
        found |= tensors
    return found


def files_with(path: Path, *names: str) -> dict[Path, set[str]]:
    """The files with the tensors of ``path``, which is a file, an index, or a folder with one of the files ``names``.

    Each has the names of the tensors that the index says it holds. Raises CheckpointError if there is no such file.
    """
    if path.is_dir():
        known = [path / (name + ending) for name in names for ending in ("", INDEX_SUFFIX)]
        file = next((file for file in known if is_present(file)), None)
        if file is None:
            raise CheckpointError(f"{path} holds no {' or '.join(names)}, whole or with an index: convert its weights")
        path = file
    return shards_of(path) if path.name.endswith(INDEX_SUFFIX) else {path: set()}


def _entries_of(file: Path) -> dict[str, Entry]:
    try:
        with open(file, "rb", opener=regular) as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > LARGEST_SETTINGS:
                raise ValueError(f"its header has {size:,} bytes, and at most {LARGEST_SETTINGS:,} are read")
            header = parse_json(opened.read(size))  # the library does not refuse a tensor that occurs twice
        with safetensors.safe_open(file, framework="np"):  # checks everything else
            tensors = {name: entry for name, entry in sorted(header.items()) if name != "__metadata__"}
            return {name: Entry(file, tuple(entry["shape"]), entry["dtype"]) for name, entry in tensors.items()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise broken(file, error) from None


def shards_of(index: Path) -> dict[Path, set[str]]:
    """The files listed in an index, which must be in its folder, and the names of their tensors."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{index} has no weight_map, which maps each tensor to its file")
    tensors: dict[str, set[str]] = {}
    for tensor, name in names.items():
        tensors.setdefault(name if isinstance(name, str) else repr(name), set()).add(tensor)
    for name in tensors:
        file = index.parent / name
        if file.name != name or not os.path.lexists(file):
            raise CheckpointError(f"{index} names the file {name!r}, which is not in the same folder")
        if file.suffix != index.with_suffix("").with_suffix("").suffix:
            raise CheckpointError(f"{index} names {name!r} as a file with tensors")
    return {index.parent / name: held for name, held in tensors.items()}


def broken(path: Path, error: Exception) -> CheckpointError:
    """The error for a file that the library cannot read."""
    if isinstance(error, OSError) and error.strerror:
        return CheckpointError(f"{path} cannot be read ({error.strerror})")
    return CheckpointError(f"{path} is not a complete safetensors file ({first_line(error)}); copy it again")
