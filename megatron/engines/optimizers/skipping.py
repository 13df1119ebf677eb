"""The base class of optimizers that skip a step on the device."""

import torch
from torch import Tensor
from torch.optim import Optimizer


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
