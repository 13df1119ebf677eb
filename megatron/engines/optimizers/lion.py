"""Lion (arXiv 2302.06675) on any device. DeepSpeed's is for CUDA; its offloaded one keeps a second moment unused."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """The sign of an interpolation between momentum and gradient, with decoupled weight decay.

    Its state has the names of DeepSpeed's: ``exp_avg``, the momentum, and ``step``, which only counts.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Sequence[float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update each parameter that has a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(parameter)}
                state["step"] += 1
                update = state["exp_avg"].lerp(gradient, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                state["exp_avg"].lerp_(gradient, 1 - beta2)
