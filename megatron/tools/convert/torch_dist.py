"""Reads weights in folders of torch.distributed.checkpoint, which megatron-core's torch_dist format is.

The pickle .metadata lists the tensors and the locations of their parts in .distcp files.
"""

import io
import math
import pickle
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass, replace
from enum import Enum
from itertools import product
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from megatron.checkpoint.tensor_files import unreadable
from megatron.common.errors import CheckpointError, reason
from megatron.common.reading import check_regular, read_bytes

METADATA = ".metadata"
_NO_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine")
"""Name prefixes of states that are not weights."""
_MOST_DIMENSIONS = 8
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
        self.folder, self.content = folder, content

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.content

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read one part at a time. Raises CheckpointError, which names the file of the part."""
        for item in plan.items:
            file = self.folder / self.storage_data[item.storage_index].relative_path
            try:
                super().read_data(replace(plan, items=[item]), planner)
            except Exception as error:  # torch raises many types for a damaged file
                raise unreadable(file, error) from error
        return super().read_data(replace(plan, items=[]), planner)


def read_torch_dist(folder: Path) -> dict[str, Tensor]:
    """Read all full weights in ``folder``.

    Raises CheckpointError if a file is missing or damaged, or could run code.
    """
    content = _read_metadata(folder / METADATA)
    try:
        entries = {
            name: entry
            for name, entry in content.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith(_NO_WEIGHTS)
        }
        for info in content.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise ValueError(f"it names the file {info.relative_path!r}, which is not in the same folder")
        files = {info.relative_path for part, info in content.storage_data.items() if part.fqn in entries}
        size = sum(_size(folder / name) for name in files)
        for name, entry in entries.items():
            _check_parts(name, entry, size)
    except CheckpointError:
        raise
    except Exception as error:  # damaged fields may raise anything
        raise CheckpointError(f"{folder / METADATA} is damaged ({reason(error)})") from error
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the missing process group
            checkpoint.load(weights, storage_reader=_Reader(folder, content), no_dist=True)
    except CheckpointException as error:
        ((cause, _),) = error.failures.values()  # of the only process
        if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):
            raise cause from None
        raise unreadable(folder, cause) from error
    return weights


def _read_metadata(file: Path) -> Metadata:
    try:
        content = _Unpickler(io.BytesIO(read_bytes(file))).load()
        if not isinstance(content, Metadata):
            raise ValueError(f"it holds a {type(content).__name__}, and should hold metadata")
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{file} cannot be read ({reason(error)})") from error
    content.storage_meta = StorageMeta()
    return content


def _size(file: Path) -> int:
    """The bytes of a file with parts of tensors. Raises CheckpointError if it is missing, or no file."""
    try:
        check_regular(file)
        return file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from None


def _check_parts(name: str, entry: TensorStorageMetadata, size: int) -> None:
    """Raises ValueError unless the parts of a tensor tile it, and it fits into files of ``size`` bytes."""
    # Includes the sizes themselves: an empty tensor may claim a billion layers.
    if max(math.prod(entry.size) * entry.properties.dtype.itemsize, *entry.size, 0) > size:
        raise ValueError(f"{name} is {list(entry.size)}, which is more than the .distcp files there hold")
    if len(entry.size) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(entry.size)} dimensions, and at most {_MOST_DIMENSIONS} can be read")
    boxes = [(part.offsets, part.sizes) for part in entry.chunks]
    has_negative = any(size < 0 for sizes in (entry.size, *(sizes for _, sizes in boxes)) for size in sizes)
    if has_negative or _corners(boxes) != _corners([([0] * len(entry.size), entry.size)]):
        raise ValueError(f"the parts of {name} do not fill {list(entry.size)}, each place once")


def _corners(boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Counter[tuple[int, ...]]:
    """The sum of the signs of the corners at each place, for boxes of (begins, sizes).

    It is the mixed derivative of the number of boxes that cover a place: equal sums mean that the same is covered.
    """
    corners = Counter[tuple[int, ...]]()
    for begins, sizes in boxes:
        edges = [((begin, 1), (begin + size, -1)) for begin, size in zip(begins, sizes, strict=True)]
        for corner in product(*edges):
            corners[tuple(place for place, _ in corner)] += math.prod(sign for _, sign in corner)
    return corners
