"""Steps that the device clips and skips, so that the host need not wait for the norm of the gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def takes_scale(optimizer: Any) -> bool:
    """Whether ``optimizer`` divides gradients by its ``grad_scale``, and skips steps on the device.

    Fused optimizers of torch do, Muon and Lion.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def scale_and_skip(optimizer: Any, norm: Tensor, divisor: Tensor) -> Tensor:
    """Make the next step divide gradients by ``divisor`` [], or do nothing if ``norm`` [] is not finite.

    Returns whether the step will be skipped, [].
    """
    skips = ~norm.isfinite()
    optimizer.grad_scale, optimizer.found_inf = divisor.float(), skips.float()
    if isinstance(optimizer, torch.optim.SGD):  # a skipped first step would leave new momentum uninitialized
        for group in optimizer.param_groups if optimizer.defaults["momentum"] else ():
            for weight in group["params"]:
                if not optimizer.state[weight]:
                    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return skips


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """The divisor (at least 1) that clips a gradient of this ``norm`` at ``limit``."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


class SkippingOptimizer(Optimizer):
    """Base class: as torch's fused optimizers do, a step divides gradients by ``grad_scale`` [], unless it is None, and
    changes nothing if ``found_inf`` [] is 1."""

    _step_supports_amp_scaling = True
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def scaled(self, gradient: Tensor) -> Tensor:
        """Divide ``gradient`` by the scale, in place; zeros in a step that is skipped."""
        if self.found_inf is None or self.grad_scale is None:
            return gradient
        return gradient.div_(self.grad_scale).masked_fill_(self.found_inf.bool(), 0)

    def unless_skipped(self, value: float, otherwise: float) -> float | Tensor:
        """``value``, or ``otherwise`` in a step that is skipped, [] on the device."""
        return value if self.found_inf is None else torch.where(self.found_inf.bool(), otherwise, value)
