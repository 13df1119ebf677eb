"""DeepSpeed's checkpoint engine: collects states to save, copied for an asynchronous writer, and loads files.

Copies of device tensors are in pinned host memory.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from megatron.checkpoint.saved_layout import expert_file
from megatron.checkpoint.stored import WEIGHT, State
from megatron.checkpoint.tensor_files import read_file
from megatron.config import RunConfig
from megatron.engines.state import parameter_states
from megatron.parallel import coordinates
from megatron.parallel.expert import expert_group_of


class HostCopies:
    """Copies of state that is in host memory; they are complete when ``start`` returns."""

    def start(self, item: Any, used: Sequence[Tensor] = ()) -> Any:
        """Start a copy by ``in_host_memory``; the writer must call ``wait`` before it reads the result."""
        return in_host_memory(item, used)

    def wait(self) -> None:
        """Wait until all copies are complete."""


class PinnedCopies(HostCopies):
    """Copies of device tensors into pinned memory, on a separate stream.

    They start after the work that is already on the compute stream. Neither the host nor the next forward and backward
    passes wait for them; the next step of ``optimizer`` does, on the device, before it overwrites the tensors.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._stream, self._copied = get_accelerator().Stream(), get_accelerator().Event()
        self._sources: list[Tensor] = []  # keeps the memory of temporary tensors until they are copied
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
    """A ``PinnedCopies`` for the state of ``engine``; None on the CPU."""
    return None if get_accelerator().device_name() == "cpu" else PinnedCopies(engine.basic_optimizer)


def in_host_memory(item: Any, used: Sequence[Tensor] = (), *, pinned: bool = False) -> Any:
    """A copy of ``item`` with its tensors in host memory; the memory of ``used`` is reused for equal shapes.

    Copies of device tensors into ``pinned`` memory are asynchronous.
    """
    memory = iter(used)

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        leaf, into = leaf.detach(), next(memory, None)
        if into is None or (into.shape, into.stride(), into.dtype) != (leaf.shape, leaf.stride(), leaf.dtype):
            into = torch.empty_like(leaf, device="cpu", pin_memory=pinned)
        return into.copy_(leaf, non_blocking=pinned)

    return tree_map(copy_leaf, item, is_leaf=is_size)


def is_size(item: Any) -> bool:
    """Whether ``item`` is a torch.Size, which pytree functions would convert to a tuple."""
    return isinstance(item, torch.Size)


def tensors_of(item: Any) -> list[Tensor]:
    """The tensors in ``item``, in pytree order."""
    return [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]


StateFile = tuple[Path, Any]
"""(path, content) of a file to write."""


class EngineFiles(CheckpointEngine):
    """DeepSpeed checkpoint engine that keeps saved states in memory for a writer, and loads without running code.

    With ``copies`` it keeps copies in host memory, whose memory is reused, so that training can continue. Otherwise it
    keeps the tensors themselves, for a writer that finishes before training continues.
    """

    def __init__(self, copies: HostCopies | None = None):
        super().__init__()
        self.copies, self._to_write, self._used = copies, list[StateFile](), dict[str, list[Tensor]]()
        self._preloaded: dict[str, Any] = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` for the file ``path``. The previous file of that name must have been written."""
        if self.copies is not None:
            name = Path(path).name
            state_dict = self.copies.start(state_dict, self._used.get(name, []))
            self._used[name] = tensors_of(state_dict)
        else:
            state_dict = tree_map(_copy_if_view, state_dict, is_leaf=is_size)
        self._to_write.append((Path(path), state_dict))

    @contextmanager
    def holding(self, contents: dict[str, Any]) -> Iterator[None]:
        """Context in which ``load`` returns the given ``contents`` by file name."""
        self._preloaded = contents
        yield
        self._preloaded = {}

    def wait(self) -> None:
        """Wait, in the writer, until all copies are complete."""
        if self.copies is not None:
            self.copies.wait()

    def take(self) -> list[StateFile]:
        """The files saved since the last call."""
        files, self._to_write = self._to_write, []
        return files

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of ``path``, on the CPU. The caller has compared the file with the manifest.

        Weights are memory-mapped, and read when they are copied into the model; DeepSpeed may keep other tensors.
        """
        if Path(path).name in self._preloaded:
            return self._preloaded[Path(path).name]
        content = read_file(Path(path))
        if Path(path).name.startswith("layer_"):
            return content
        return {key: value if key == "module" else in_host_memory(value) for key, value in content.items()}

    def preserves_storage_sharing(self) -> bool:
        """False, so that DeepSpeed does not copy views: ``save`` copies them if their storage is larger."""
        return False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: the writer makes folders."""

    def create(self, info: Any) -> None:
        """Do nothing."""

    def commit(self, info: Any) -> bool:
        """Do nothing: the checkpoint is committed later, for all ranks at once."""
        return True


def _copy_if_view(leaf: Any) -> Any:
    """``leaf``, or a copy in host memory if it is a view of a larger storage, which would be saved completely.

    Views of ZeRO's storages that only lack padding are not copied.
    """
    if not isinstance(leaf, Tensor) or leaf.nbytes >= 0.9 * leaf.untyped_storage().nbytes():
        return leaf
    return leaf.detach().to("cpu", copy=True)


def bytes_of(item: Any) -> int:
    """Bytes that the tensors in ``item`` need in a file; each storage counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(item)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def own_experts(engine: DeepSpeedEngine, run: RunConfig, folder: Path) -> tuple[Path, dict[str, State]] | None:
    """The expert file that this rank must write into ``folder``, and its content; None if it writes none.

    One of the ranks that hold the same experts writes it.
    """
    parallel, coordinate = run.parallel, coordinates(run.parallel, dist.get_rank())
    replica, expert_rank = divmod(coordinate["data"], parallel.expert_model_parallel_size)
    if replica > 0 or expert_rank == 0:
        return None
    has_state = run.zero.zero_stage == 0 and not run.checkpoint.no_save_optim
    states = parameter_states(engine) if has_state else {}
    content = {
        name: {**states.get(name, {}), WEIGHT: parameter.detach()}
        for name, parameter in engine.module.named_parameters()
        if expert_group_of(parameter) is not None
    }
    mp_rank = coordinate["pipe"] * parallel.model_parallel_size + coordinate["tensor"]
    return expert_file(folder, expert_rank, mp_rank), content
