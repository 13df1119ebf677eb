"""Reads weights in folders of torch.distributed.checkpoint, which megatron-core's torch_dist format is.

The pickle .metadata lists the tensors and the locations of their parts in .distcp files.
"""

import io
import math
import pickle
import warnings
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from megatron.common.errors import CheckpointError, first_line
from megatron.common.reading import read_bytes

METADATA = ".metadata"
_NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine")
"""Name prefixes of states that are not weights."""
_MODULES: dict[str, ModuleType] = {module.__name__: module for module in (metadata, planner, filesystem)}


def _member(kind: Any, name: str) -> Enum:
    """What Python 3.11.0 to 3.11.3 write the member of an enumeration as: ``getattr(kind, name)``."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"it asks for {name} of an object, which could run code")


_ALLOWED = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): PurePosixPath,
}


class _Unpickler(pickle.Unpickler):
    """Loads only data classes and enumerations of torch's metadata, sizes and dtypes: nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        value = getattr(torch if module == "torch" else _MODULES.get(module), name, None)
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, type) and value.__module__ == module and (is_dataclass(value) or issubclass(value, Enum)):
            return value
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which could run code")


class _Reader(FileSystemReader):
    """torch's reader, with metadata that have already been read and checked."""

    def __init__(self, folder: Path, content: Metadata):
        super().__init__(folder)
        self.content = content

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.content


def read_torch_dist(folder: Path) -> dict[str, Tensor]:
    """Read all full weights in ``folder``.

    Raises CheckpointError if a file is missing or damaged, or could run code.
    """
    content = _read_metadata(folder / METADATA)
    size = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    try:
        entries = {
            name: entry
            for name, entry in content.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NO_WEIGHTS)
        }
        for name, entry in entries.items():
            _check_parts(name, entry, size)
        for info in content.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"it names the file {info.relative_path!r}, which is not in the same folder")
    except Exception as error:  # damaged fields may raise anything
        raise CheckpointError(f"{folder / METADATA} is damaged ({first_line(error)})") from error
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            checkpoint.load(weights, storage_reader=_Reader(folder, content), no_dist=True)
    except (Exception, CheckpointException) as error:  # torch raises many types for a damaged file
        raise CheckpointError(f"{folder} cannot be read ({_reason(error)})") from error
    return weights


def _read_metadata(file: Path) -> Metadata:
    try:
        content = _Unpickler(io.BytesIO(read_bytes(file))).load()
        if not isinstance(content, Metadata):
            raise ValueError(f"it holds a {type(content).__name__}, and should hold metadata")
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{file} cannot be read ({first_line(error)})") from error
    content.storage_meta = StorageMeta()
    return content


def _check_parts(name: str, entry: TensorStorageMetadata, size: int) -> None:
    """Raises ValueError unless the parts of a tensor fill it, and it fits into files of ``size`` bytes."""
    numel = math.prod(entry.size)
    # Includes the sizes themselves: an empty tensor may claim a billion layers.
    if max(numel * entry.properties.dtype.itemsize, *entry.size, 0) > size:
        raise ValueError(f"{name} is {list(entry.size)}, which is more than the .distcp files there hold")
    if sum(math.prod(part.sizes) for part in entry.chunks) != numel:
        raise ValueError(f"the parts of {name} do not fill {list(entry.size)}")


def _reason(error: BaseException) -> str:
    """The first line of an error; torch wraps the error of the only process in a CheckpointException."""
    if isinstance(error, CheckpointException):
        ((error, _),) = error.failures.values()
    return first_line(error) if isinstance(error, Exception) else type(error).__name__
