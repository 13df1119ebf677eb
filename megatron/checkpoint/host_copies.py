"""Copies of a state in host memory, for a writer in the background."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map


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
