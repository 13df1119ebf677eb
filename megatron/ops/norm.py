"""LayerNorm and RMSNorm classes, created from (size, eps=...): from torch, NVIDIA apex, or one for CPUs."""

import importlib.util
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig


def choose_norm(config: ModelConfig, *, fp32_residual: bool) -> type[nn.Module]:
    """The norm class of the model; with ``fp32_residual`` for fp32 inputs and outputs in the dtype of the weights."""
    if uses_apex(config.fused_kernels):
        from apex import normalization  # parameters have the same names as in torch

        return getattr(normalization, f"{'Mixed' if fp32_residual else ''}Fused{config.normalization}")
    if fp32_residual:
        return {"LayerNorm": Fp32ResidualLayerNorm, "RMSNorm": Fp32ResidualRMSNorm}[config.normalization]
    if config.normalization == "LayerNorm":
        return nn.LayerNorm
    return CpuRMSNorm if get_accelerator().device_name() == "cpu" and not config.compile else nn.RMSNorm


def uses_apex(fused_kernels: str) -> bool:
    """Whether ``--fused-kernels`` selects apex on this machine."""
    is_available = get_accelerator().device_name() == "cuda" and importlib.util.find_spec("apex") is not None
    return fused_kernels == "apex" or (fused_kernels == "auto" and is_available)


class Fp32ResidualLayerNorm(nn.LayerNorm):
    """LayerNorm of an fp32 residual stream in fp32, with output in the dtype of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class Fp32ResidualRMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) of an fp32 residual stream in fp32, with output in the dtype of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, self.weight.float(), self.eps).to(self.weight.dtype)


class CpuRMSNorm(nn.RMSNorm):
    """RMSNorm in fp32 that saves only its input, like torch's kernel on GPUs.

    On a CPU torch's RMSNorm also saves the normalized input in fp32, and in bf16 an fp32 copy of the input: the peak
    memory of a small Llama is then 11 % higher (tests/tools/planning/test_measured_memory.py).
    """

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = _RMSNorm.apply(hidden, self.weight, self.eps)
        return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, weighted = x * scale, grad.float() * weight
        weight_grad = (grad * normed).flatten(0, -2).sum(0)
        x_grad = weighted.sub_(normed * (weighted * normed).mean(-1, keepdim=True)).mul_(scale)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None
