"""Norms of hidden states, created from (size, eps=...): torch's classes, NVIDIA apex's, or one for CPUs."""

import importlib.util
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig


def choose_norm(config: ModelConfig, *, fp32_residual: bool) -> type[nn.Module]:
    """The class of the model's norm; with ``fp32_residual`` its input is fp32 and its output has the weights' type."""
    if uses_apex(config.fused_kernels):
        from apex import normalization  # where it is installed; its parameters have torch's names

        return getattr(normalization, f"{'Mixed' if fp32_residual else ''}Fused{config.normalization}")
    if fp32_residual:
        return {"LayerNorm": Fp32ResidualLayerNorm, "RMSNorm": Fp32ResidualRMSNorm}[config.normalization]
    if config.normalization == "LayerNorm":
        return nn.LayerNorm
    return CpuRMSNorm if get_accelerator().device_name() == "cpu" and not config.compile else nn.RMSNorm


def uses_apex(fused_kernels: str) -> bool:
    """Whether ``--fused-kernels`` selects apex on this machine."""
    found = get_accelerator().device_name() == "cuda" and importlib.util.find_spec("apex") is not None
    return fused_kernels == "apex" or (fused_kernels == "auto" and found)


class Fp32ResidualLayerNorm(nn.LayerNorm):
    """Normalizes an fp32 residual stream in fp32; its output has the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class Fp32ResidualRMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) of an fp32 residual stream; its output has the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, self.weight.float(), self.eps).to(self.weight.dtype)


class CpuRMSNorm(nn.RMSNorm):
    """RMSNorm that saves only its input, as the kernel on GPUs does, and computes in fp32.

    On a CPU torch's saves the normalized input in fp32, too, and in bf16 a copy of the input in fp32: a small Llama
    then takes 11 % more memory at its peak (tests/tools/planning/test_measured_memory.py).
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
        of_weight = (grad * normed).flatten(0, -2).sum(0)
        of_x = weighted.sub_(normed * (weighted * normed).mean(-1, keepdim=True)).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None
