"""apex's FusedAdam in plain torch, as far as its interface is documented: the step count is in the parameter groups."""

import sys
from types import ModuleType

import torch


def install() -> None:
    """Make ``from apex.optimizers import FusedAdam`` work, and ``--fused-kernels auto`` choose it on the CPU."""
    from deepspeed.runtime.zero import utils

    from megatron.training import engines

    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    FusedAdam.__module__ = "apex.optimizers.fused_adam"
    apex.optimizers, optimizers.FusedAdam = optimizers, FusedAdam
    sys.modules |= {"apex": apex, "apex.optimizers": optimizers, FusedAdam.__module__: optimizers}
    utils.ZERO_SUPPORTED_OPTIMIZERS.append(FusedAdam)  # which DeepSpeed does if it finds apex
    engines.uses_apex = lambda fused_kernels: fused_kernels == "auto"


class FusedAdam(torch.optim.Optimizer):
    """AdamW; ``adam_w_mode=False`` is not needed by the tests."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
    ):
        assert adam_w_mode and bias_correction and not amsgrad
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None):
        """Update the parameters, and the step count of each group."""
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), steps = group["betas"], group["step"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter.data)
                    state["exp_avg_sq"] = torch.zeros_like(parameter.data)
                assert "step" not in state
                state["exp_avg"].mul_(beta1).add_(parameter.grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                root = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_().add_(group["eps"])
                parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - beta1**steps))
