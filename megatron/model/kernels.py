"""Kernels that may come from apex or from torch's compiler instead of from plain torch."""

import importlib.util
from collections.abc import Callable
from functools import cache, partial

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig


def uses_apex(fused_kernels: str) -> bool:
    """Whether ``--fused-kernels`` comes to apex on this machine."""
    found = get_accelerator().device_name() == "cuda" and importlib.util.find_spec("apex") is not None
    return fused_kernels == "apex" or (fused_kernels == "auto" and found)


def layer_norm_class(config: ModelConfig) -> type[nn.Module]:
    """apex's fused layer norm or torch's; all are made from (size, eps=...) and name their parameters alike."""
    if uses_apex(config.fused_kernels):
        from apex.normalization import FusedLayerNorm, MixedFusedLayerNorm

        return MixedFusedLayerNorm if config.fp32_residual_connection else FusedLayerNorm
    return Fp32StreamLayerNorm if config.fp32_residual_connection else nn.LayerNorm


class Fp32StreamLayerNorm(nn.LayerNorm):
    """Out of an fp32 residual stream into the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


def bias_gelu(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
    """GELU(x + bias) as one compiled kernel, or None where it is not asked for."""
    return partial(_compiled(_bias_gelu), approximate=_gelu_kind(config)) if config.bias_gelu_fusion else None


def gelu(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """GELU, exact or OpenAI's tanh approximation."""
    return partial(F.gelu, approximate=_gelu_kind(config))


def dropout_add(config: ModelConfig) -> Callable[[Tensor, Tensor, float], Tensor]:
    """residual + dropout(x), compiled into one kernel where that is asked for."""
    return _compiled(_dropout_add) if config.bias_dropout_fusion else _dropout_add


def _gelu_kind(config: ModelConfig) -> str:
    return "tanh" if config.openai_gelu else "none"


def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _dropout_add(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    return residual + F.dropout(x, dropout)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)
