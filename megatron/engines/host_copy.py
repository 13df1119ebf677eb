"""Numbers that the host reads from a GPU later, so that it need not wait for what the GPU has to do."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor


class HostCopy:
    """Numbers on their way from a GPU to the host: one copy, for which nothing waits until it is read."""

    def __init__(self, values: Mapping[str, float | Tensor | None]):
        """Start the copy of the tensors [] among ``values``."""
        self._values: dict[str, Any] = {name: _number(value) for name, value in values.items()}
        tensors = [value.detach().double().reshape(()) for value in self._values.values() if isinstance(value, Tensor)]
        self.has_arrived = not tensors
        """Whether reading does not wait, as on the CPU."""
        if tensors:
            numbers = torch.stack(tensors)
            self._numbers = get_accelerator().pin_memory(torch.empty(numbers.shape, dtype=numbers.dtype))
            self._numbers.copy_(numbers, non_blocking=True)
            self._copied = get_accelerator().Event()
            self._copied.record()

    def read(self) -> dict[str, Any]:
        """The values as numbers, after the GPU has computed them."""
        if not self.has_arrived:
            self._copied.synchronize()
            numbers = iter(self._numbers.tolist())
            for name, value in self._values.items():
                if isinstance(value, Tensor):
                    self._values[name] = next(numbers) if value.is_floating_point() else int(next(numbers))
            self.has_arrived = True
        return self._values


def _number(value: float | Tensor | None) -> float | Tensor | None:
    """``value`` as a number, unless it is on a GPU."""
    return value.item() if isinstance(value, Tensor) and value.is_cpu else value
