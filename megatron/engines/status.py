"""What an engine reports of a step, which the host reads from a GPU later, so that it need not wait for the step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron.common.errors import NumericsError


class HostCopy:
    """Numbers on their way from a GPU to the host: one copy, for which nothing waits until it is read."""

    def __init__(self, values: Mapping[str, float | Tensor | None]):
        """Start the copy of the tensors [] among ``values``."""
        self._values: dict[str, Any] = {name: _number(value) for name, value in values.items()}
        tensors = [value.detach().reshape(()) for value in self._values.values() if isinstance(value, Tensor)]
        self.has_arrived = not tensors
        """Whether reading does not wait, as on the CPU."""
        if tensors:
            # torch.stack takes the largest type of all, in which large integers would not fit beside fp32.
            numbers = torch.stack([one.double() if one.dtype in (torch.int32, torch.int64) else one for one in tensors])
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
    """What an engine reports after a step."""

    outcome: HostCopy
    """Whether it was "skipped", and the "loss_scale" after it."""
    learning_rate: float
    grad_norm: float | Tensor | None
    """2-norm of the gradient of the model, [] or a number, before clipping."""
    skipped_before: int
    """Iterations before this one whose gradients were not finite."""
    loss_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """The terms of the loss by name, [], averaged like the loss; none if the loss has a single one."""

    @property
    def applied(self) -> bool:
        """Whether the weights were updated; they are not if the gradient was not finite. Waits for the device."""
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

    DeepSpeed: runtime/fp16/loss_scaler.py, ``update_scale`` raises a bare Exception, known only from its text.
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
