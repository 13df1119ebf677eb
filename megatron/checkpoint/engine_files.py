"""A checkpoint engine for DeepSpeed that keeps in memory what DeepSpeed saves, until a writer puts it on disk."""

import copy
from collections.abc import Sequence
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


class EngineFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine that keeps what is saved in memory for a writer, and loads without running code.

    With ``copies`` it keeps copies in host memory, so that training can continue. Their memory is used again. Otherwise
    it keeps the tensors themselves, for a writer that is done before training continues.
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
        else:
            state_dict = tree_map(_without_other_data, state_dict, is_leaf=_is_size)
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
        """No: DeepSpeed need not copy views, of which ``save`` would otherwise keep all of their storage."""
        return False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        make_folder(Path(path))

    def create(self, info: Any) -> None:
        """Do nothing."""

    def commit(self, info: Any) -> bool:
        """Do nothing: the checkpoint is committed later, for all ranks at once."""
        return True


def in_host_memory(item: Any, used: Sequence[Tensor] = ()) -> Any:
    """A copy of ``item``, its tensors in host memory: in the memory of ``used`` ones if shapes are the same."""
    memory = iter(used)

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        leaf, into = leaf.detach(), next(memory, None)
        if into is None or (into.shape, into.stride(), into.dtype) != (leaf.shape, leaf.stride(), leaf.dtype):
            into = torch.empty_like(leaf, device="cpu")
        return into.copy_(leaf)

    return tree_map(copied, item, is_leaf=_is_size)


def _without_other_data(leaf: Any) -> Any:
    """``leaf``, or a copy in host memory of a tensor that is a part of its storage, all of which would be saved.

    Parts of ZeRO's storages that lack no more than padding are not copied.
    """
    if not isinstance(leaf, Tensor) or leaf.nbytes >= 0.9 * leaf.untyped_storage().nbytes():
        return leaf
    return leaf.detach().to("cpu", copy=True)


def _is_size(item: Any) -> bool:
    """Whether ``item`` is a shape, which pytree functions would turn into a tuple."""
    return isinstance(item, torch.Size)


def bytes_of(item: Any) -> int:
    """Bytes of the tensors in ``item`` in a file. Each storage counts once."""
    storages = [tensor.untyped_storage() for tensor in _tensors(item)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(item: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]
