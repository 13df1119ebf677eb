"""A checkpoint engine for DeepSpeed that keeps in memory what DeepSpeed saves, until a writer puts it on disk."""

import copy
import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from megatron.checkpoint.files import make_folder
from megatron.checkpoint.tensor_files import read_file

StateFile = tuple[Path, Any]
"""A file to be written, and its content."""
_COPYING, _PART = 4, 1 << 22
"""Threads that copy tensors, and bytes that each copies at a time."""


class EngineFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine that keeps what is saved in memory for a writer, and loads without running code.

    With ``copies`` it keeps copies in host memory, so that training can continue. Their memory is used again.
    """

    def __init__(self, *, copies: bool):
        super().__init__()
        self._copies, self._kept, self._used = copies, list[StateFile](), dict[str, list[Tensor]]()

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` for the file ``path``. The file of that name before it must have been written."""
        if self._copies:
            name = Path(path).name
            state_dict = in_host_memory(state_dict, self._used.get(name, []))
            self._used[name] = _tensors(state_dict)
        self._kept.append((Path(path), state_dict))

    def take(self) -> list[StateFile]:
        """Everything kept since the last call."""
        kept, self._kept = self._kept, []
        return kept

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of ``path``, on the CPU, after a comparison with the manifest.

        Weights are still in the file, and read when they are copied into the model. DeepSpeed keeps other tensors.
        """
        content = read_file(Path(path), mapped=True)
        if Path(path).name.startswith("layer_"):
            return content
        return {key: value if key == "module" else in_host_memory(value) for key, value in content.items()}

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed has to copy views, or their whole storage is saved. Copies made here are no views."""
        return not self._copies

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        make_folder(Path(path))

    def create(self, info: Any) -> None:
        """Do nothing."""

    def commit(self, info: Any) -> bool:
        """Do nothing: the checkpoint is committed later, for all ranks at once."""
        return True


def in_host_memory(item: Any, used: Sequence[Tensor] = ()) -> Any:
    """A copy of ``item``, its tensors in host memory: that of ``used`` tensors where they have the same shapes."""
    memory, copies = iter(used), list[tuple[Tensor, Tensor]]()

    def placed(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        leaf, into = leaf.detach(), next(memory, None)
        if into is None or (into.shape, into.stride(), into.dtype) != (leaf.shape, leaf.stride(), leaf.dtype):
            into = torch.empty_like(leaf, device="cpu")
        copies.append((into, leaf))
        return into

    placed_item = tree_map(placed, item, is_leaf=lambda part: isinstance(part, torch.Size))  # otherwise a tuple there
    _copy(copies)
    return placed_item


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first tensor of each pair the second one. Several threads copy what are plain bytes.

    torch itself uses OMP_NUM_THREADS of them, which is 1 in many launchers.
    """
    parts = list[tuple[int, int, int]]()
    for into, leaf in pairs:
        if _is_plain(into) and _is_plain(leaf):
            begins = range(0, leaf.nbytes, _PART)
            parts += [(into.data_ptr() + n, leaf.data_ptr() + n, min(_PART, leaf.nbytes - n)) for n in begins]
        else:
            into.copy_(leaf)

    def copy_parts(first: int) -> None:
        for part in parts[first::_COPYING]:
            ctypes.memmove(*part)

    with ThreadPoolExecutor(_COPYING, "copy") as threads:
        for thread in [threads.submit(copy_parts, first) for first in range(_COPYING)]:
            thread.result()


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values are consecutive bytes in host memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_complex()


def bytes_of(item: Any) -> int:
    """Bytes of the tensors in ``item`` in a file. Each storage counts once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(item)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(item: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]
