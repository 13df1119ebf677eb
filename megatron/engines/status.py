"""Status of a training step, copied from the GPU asynchronously so that the host does not wait for the step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.common.errors import NumericsError


class HostCopy:
    """An asynchronous copy of numbers from a GPU to the host; only ``read`` waits for it."""

    def __init__(self, values: Mapping[str, float | Tensor | None]):
        """Start the copy of the tensors [] among ``values``."""
        self._values: dict[str, Any] = {name: _number(value) for name, value in values.items()}
        tensors = [value.detach().reshape(()) for value in self._values.values() if isinstance(value, Tensor)]
        self.has_arrived = not tensors
        """Whether ``read`` does not have to wait, as on the CPU."""
        if tensors:
            # torch.stack would convert large integers next to fp32 numbers to fp32, which is not exact.
            numbers = torch.stack([x.double() if x.dtype in (torch.int32, torch.int64) else x for x in tensors])
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


@dataclass(frozen=True)
class StepStatus:
    """The status of a training step."""

    outcome: HostCopy
    """"skipped": whether the step was skipped; "loss_scale": the loss scale after it."""
    learning_rate: float
    grad_norm: float | Tensor | None
    """2-norm of the gradient of the model, [] or a number, before clipping."""
    skipped_before: int
    """Iterations before this one whose gradients were not finite."""
    loss_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Terms of the loss by name, [] each, averaged like the loss; empty if the loss has a single term."""

    @property
    def applied(self) -> bool:
        """Whether the weights were updated: not if the gradient was not finite. Waits for the device."""
        return not self.outcome.read()["skipped"]

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step. Waits for the device."""
        return float(self.outcome.read()["loss_scale"])

    @property
    def skipped_iterations(self) -> int:
        """Iterations up to this one whose gradients were not finite."""
        return self.skipped_before + (not self.applied)


@contextmanager
def loss_scale_limit_reported() -> Iterator[None]:
    """Raise NumericsError, the same on all ranks, if gradients overflow at the smallest loss scale of fp16.

    DeepSpeed: runtime/fp16/loss_scaler.py, ``update_scale`` raises a bare Exception, recognizable only by its text.
    Test: tests/training/test_fp16.py.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise NumericsError(
            "gradients overflow even at the smallest loss scale, --min-scale: lower --lr, or use --bf16"
        ) from error
