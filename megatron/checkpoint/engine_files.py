"""What DeepSpeed's engine saves and loads passes through here: states for a writer, copied for one in the background.

Copies are in host memory, of a device's tensors in pinned memory.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from megatron.checkpoint.files import make_folder
from megatron.checkpoint.tensor_files import read_file


class HostCopies:
    """Copies of what is in host memory already: done when ``start`` returns."""

    def start(self, item: Any, used: Sequence[Tensor] = ()) -> Any:
        """Start ``in_host_memory``; the writer has to ``wait`` before it reads the result."""
        return in_host_memory(item, used)

    def wait(self) -> None:
        """Let the host wait until all that has been started is copied."""


class PinnedCopies(HostCopies):
    """Copies of what a device computes, into pinned memory, on a stream of their own beside the compute stream.

    They begin after what the compute stream has to do by then. Neither the host nor the next forward and backward pass
    waits for them; the next update of ``optimizer`` does, on the device, before it overwrites what they read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._stream, self._copied = get_accelerator().Stream(), get_accelerator().Event()
        self._sources: list[Tensor] = []  # the memory of temporary ones must not be used for others meanwhile
        optimizer.register_step_pre_hook(self._delay_update)

    def start(self, item: Any, used: Sequence[Tensor] = ()) -> Any:
        self._sources += tensors_of(item)
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            copied = in_host_memory(item, used, pinned=True)
            self._copied.record()
        return copied

    def wait(self) -> None:
        self._copied.synchronize()
        self._sources.clear()

    def _delay_update(self, *_: Any) -> None:
        get_accelerator().current_stream().wait_event(self._copied)


def pinned_copies(engine: DeepSpeedEngine) -> PinnedCopies | None:
    """Copies of the state of ``engine``; None on the CPU."""
    return None if get_accelerator().device_name() == "cpu" else PinnedCopies(engine.basic_optimizer)


def in_host_memory(item: Any, used: Sequence[Tensor] = (), *, pinned: bool = False) -> Any:
    """A copy of ``item``, its tensors in host memory: in the memory of ``used`` ones if shapes are the same.

    A copy of a device's tensors into ``pinned`` memory is still under way on return.
    """
    memory = iter(used)

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        leaf, into = leaf.detach(), next(memory, None)
        if into is None or (into.shape, into.stride(), into.dtype) != (leaf.shape, leaf.stride(), leaf.dtype):
            into = torch.empty_like(leaf, device="cpu")
            into = get_accelerator().pin_memory(into) if pinned else into
        return into.copy_(leaf, non_blocking=pinned)

    return tree_map(copied, item, is_leaf=is_size)


def is_size(item: Any) -> bool:
    """Whether ``item`` is a shape, which pytree functions would turn into a tuple."""
    return isinstance(item, torch.Size)


def tensors_of(item: Any) -> list[Tensor]:
    """The tensors in ``item``, in the order of pytrees."""
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]


StateFile = tuple[Path, Any]
"""A file to be written, and its content."""


class EngineFiles(CheckpointEngine):
    """DeepSpeed's checkpoint engine that keeps what is saved in memory for a writer, and loads without running code.

    With ``copies`` it keeps copies in host memory, so that training can continue. Their memory is used again. Otherwise
    it keeps the tensors themselves, for a writer that is done before training continues.
    """

    def __init__(self, copies: HostCopies | None = None):
        super().__init__()
        self.copies, self._kept, self._used = copies, list[StateFile](), dict[str, list[Tensor]]()
        self._held: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` for the file ``path``. The file of that name before it must have been written."""
        if self.copies is not None:
            name = Path(path).name
            state_dict = self.copies.start(state_dict, self._used.get(name, []))
            self._used[name] = tensors_of(state_dict)
        else:
            state_dict = tree_map(_without_other_data, state_dict, is_leaf=is_size)
        self._kept.append((Path(path), state_dict))

    @contextmanager
    def holding(self, contents: dict[str, Any]) -> Iterator[None]:
        """While inside, ``load`` takes the files of these names from ``contents``."""
        self._held = contents
        yield
        self._held = {}

    def wait(self) -> None:
        """Let a writer wait until all copies are complete."""
        if self.copies is not None:
            self.copies.wait()

    def take(self) -> list[StateFile]:
        """Everything kept since the last call."""
        kept, self._kept = self._kept, []
        return kept

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of ``path``, on the CPU, which was compared with the manifest before.

        Weights are still in the file, and read when they are copied into the model. DeepSpeed keeps other tensors.
        """
        if Path(path).name in self._held:
            return self._held[Path(path).name]
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


def _without_other_data(leaf: Any) -> Any:
    """``leaf``, or a copy in host memory of a tensor that is a part of its storage, all of which would be saved.

    Parts of ZeRO's storages that lack no more than padding are not copied.
    """
    if not isinstance(leaf, Tensor) or leaf.nbytes >= 0.9 * leaf.untyped_storage().nbytes():
        return leaf
    return leaf.detach().to("cpu", copy=True)


def bytes_of(item: Any) -> int:
    """Bytes of the tensors in ``item`` in a file. Each storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(item)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
