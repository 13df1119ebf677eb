"""Norms of hidden states, created from (size, eps=...): torch's classes, apex's fused ones, or one for CPUs."""

from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.ops import apex, cpu


def choose_norm(config: ModelConfig, *, fp32_residual: bool) -> type[nn.Module]:
    """The class of the model's norm; with ``fp32_residual`` its input is fp32 and its output has the weights' type."""
    if apex.uses_apex(config.fused_kernels):
        return apex.norms(fp32_residual=fp32_residual)[config.normalization]
    if fp32_residual:
        return {"LayerNorm": Fp32ResidualLayerNorm, "RMSNorm": Fp32ResidualRMSNorm}[config.normalization]
    if config.normalization == "LayerNorm":
        return nn.LayerNorm
    return cpu.RMSNorm if get_accelerator().device_name() == "cpu" and not config.compile else nn.RMSNorm


class Fp32ResidualLayerNorm(nn.LayerNorm):
    """Normalizes an fp32 residual stream in fp32; its output has the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class Fp32ResidualRMSNorm(nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) of an fp32 residual stream; its output has the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, self.weight.float(), self.eps).to(self.weight.dtype)
