"""Tensors that are read when they are asked for, such as those of safetensors files."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from megatron.checkpoint.safetensors_files import broken, read_entries
from megatron.common.errors import CheckpointError


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read when it is asked for and not kept, so that a model need not fit into memory."""

    def __init__(self, outlines: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        """``outlines`` are tensors of the same shapes and types on the meta device, without data."""
        self.outlines, self._read = outlines, read

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.outlines:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)


def outlines_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of the same shapes and types; none is read."""
    return tensors.outlines if isinstance(tensors, LazyTensors) else tensors


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFiles(LazyTensors):
    """The tensors in one or several safetensors files, by ``read_entries``, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError as ``read_entries``, and for a type of tensor that is not known."""
        self._entries = read_entries(path)
        self._opened: dict[Path, Any] = {}
        for name, entry in self._entries.items():
            if entry.dtype not in _DTYPES:
                raise CheckpointError(f"{entry.file}: {name} is of type {entry.dtype}, which is not supported")
        super().__init__(
            {
                name: torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="meta")
                for name, entry in self._entries.items()
            },
            self._whole,
        )

    def part(self, name: str, dim: int, begin: int, end: int) -> Tensor:
        """Indices from ``begin`` to ``end`` in dimension ``dim`` of a tensor; the rest of it is not read."""
        with self._errors(name):
            return self._file(name).get_slice(name)[tuple([slice(None)] * dim + [slice(begin, end)])]

    def _whole(self, name: str) -> Tensor:
        with self._errors(name):
            return self._file(name).get_tensor(name)

    def _file(self, name: str) -> Any:
        file = self._entries[name].file
        if file not in self._opened:
            self._opened.clear()  # tensors are mostly read in the order of their files
            self._opened[file] = safetensors.safe_open(file, framework="pt")
        return self._opened[file]

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except (safetensors.SafetensorError, OSError) as error:
            raise broken(self._entries[name].file, error) from None
