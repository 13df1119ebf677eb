"""What DeepSpeed saves and loads, on its extension point for checkpoint engines."""

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor

from megatron.checkpoint.durable import make_folder
from megatron.checkpoint.files import read_checked_file

StateFile = tuple[Path, Any]
"""A file to be written, and what goes into it."""


class EngineFiles(CheckpointEngine):
    """Keeps what DeepSpeed saves until somebody takes it, and reads without running code.

    With ``copies``, what is kept lies in host memory of its own, so that training can go on.
    """

    def __init__(self, *, copies: bool):
        super().__init__()
        self.name = "EngineFiles"
        self._copies = copies
        self._kept: list[StateFile] = []

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` for the file ``path``."""
        self._kept.append((Path(path), in_host_memory(state_dict) if self._copies else state_dict))

    def take(self) -> list[StateFile]:
        """What was kept since the last time."""
        kept, self._kept = self._kept, []
        return kept

    def load(self, path: str, map_location: Any = None) -> Any:
        """What ``path`` holds, on the CPU."""
        return read_checked_file(Path(path))

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed has to copy views, whose whole storage would be saved else; our own copies are none."""
        return not self._copies

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder."""
        make_folder(Path(path))

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def commit(self, info: Any) -> bool:
        """Nothing yet: what is kept here becomes a checkpoint later, on all ranks at once."""
        return True


def in_host_memory(item: Any) -> Any:
    """A copy of ``item``, its tensors in host memory."""
    if isinstance(item, Tensor):
        return item.detach().to("cpu", copy=True)
    if type(item) in (list, tuple):
        return type(item)(map(in_host_memory, item))
    if type(item) in (dict, OrderedDict):
        return type(item)((key, in_host_memory(value)) for key, value in item.items())
    return copy.deepcopy(item)


def bytes_of(item: Any, seen: set[int] | None = None) -> int:
    """Bytes that the tensors in ``item`` take in a file: of each storage, once."""
    seen = set() if seen is None else seen
    if isinstance(item, Tensor):
        storage = item.untyped_storage()
        is_new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if is_new else 0
    if isinstance(item, dict):
        item = item.values()
    elif not isinstance(item, (list, tuple)):
        return 0
    return sum(bytes_of(part, seen) for part in item)
