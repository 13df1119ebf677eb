"""Norms, activations and dropout, from apex, torch's compiler or plain torch; initial weights."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.attention_kernel import DeviceFacts
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import WeightInit, all_reduce_gradient
from megatron.parallel.tensor.lora import LowRank


def uses_apex(fused_kernels: str) -> bool:
    """Whether ``--fused-kernels`` selects apex on this machine."""
    found = get_accelerator().device_name() == "cuda" and importlib.util.find_spec("apex") is not None
    return fused_kernels == "apex" or (fused_kernels == "auto" and found)


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """What ``attention_kernel`` has to know of ``device``."""
    if device.type != "cuda" or torch.version.hip:
        return DeviceFacts("rocm" if torch.version.hip and device.type == "cuda" else device.type)
    capability = torch.get_device_module(device).get_device_capability(device)
    fused = torch.backends.cuda.is_flash_attention_available()
    return DeviceFacts("cuda", capability, fused, has_varlen=torch.__version__ >= "2.11")


def norm_class(config: ModelConfig, layout: ParallelLayout) -> type[nn.Module]:
    """The norm of hidden states between layers, created from (size, eps=...).

    apex's fused norm or torch's; both name their parameters alike. With sequence parallelism each rank's
    gradient is of its shard of the sequence, and is summed over the tensor group.
    """
    norm = _norm(config, fp32_residual=config.fp32_residual_connection)
    return _sharded_norm(norm, layout.tensor_group) if layout.sequence_parallel else norm


def head_norm_class(config: ModelConfig, layout: ParallelLayout) -> type[nn.Module]:
    """The norm of each head's queries or keys. A rank has its own heads, so that gradients are summed."""
    return _sharded_norm(_norm(config, fp32_residual=False), layout.tensor_group)


def _norm(config: ModelConfig, *, fp32_residual: bool) -> type[nn.Module]:
    if uses_apex(config.fused_kernels):
        from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

        if fp32_residual:
            return {"LayerNorm": MixedFusedLayerNorm, "RMSNorm": MixedFusedRMSNorm}[config.normalization]
        return {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}[config.normalization]
    if fp32_residual:
        return {"LayerNorm": Fp32ResidualLayerNorm, "RMSNorm": Fp32ResidualRMSNorm}[config.normalization]
    return {"LayerNorm": nn.LayerNorm, "RMSNorm": RMSNorm}[config.normalization]


def _sharded_norm(norm: type[nn.Module], group: ProcessGroup) -> type[nn.Module]:
    class ShardedNorm(norm):  # type: ignore[valid-type, misc]  # a class that is chosen at run time
        """A norm of a rank's part of the sequence or of the heads, whose weights are replicated."""

        def __init__(self, size: int, eps: float):
            super().__init__(size, eps=eps)
            for parameter in self.parameters():
                all_reduce_gradient(parameter, group)

    return ShardedNorm


class Fp32ResidualLayerNorm(nn.LayerNorm):
    """Normalizes an fp32 residual stream in fp32; its output has the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) x weight (arXiv 1910.07467), which keeps its input alone for the backward pass."""

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps or 0.0)


class Fp32ResidualRMSNorm(nn.RMSNorm):
    """The same of an fp32 residual stream; its output has the type of the weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight.float(), self.eps or 0.0).to(self.weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in fp32; the output has the type of ``x``.

    torch's has one kernel on GPUs. On a CPU it runs step by step, and would keep the normalized input, too.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    output: Tensor = _RMSNorm.apply(x, weight, eps)
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """By the kernel of layer norm, of a mean that is 0, with what that takes away for the mean's sake added."""
        x, weight, scale = ctx.saved_tensors
        wide, wide_weight, size = grad.float(), weight.float(), x.size(-1)
        of_x, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            wide, x.float(), [size], torch.zeros_like(scale), scale, wide_weight, None, [True, True, False]
        )
        of_x += (wide @ (wide_weight / size)).unsqueeze(-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def bias_gelu(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
    """GELU(x + bias) as one compiled kernel, or None without ``--bias-gelu-fusion``."""
    return partial(_compiled(_bias_gelu), approximate=_gelu_kind(config)) if config.bias_gelu_fusion else None


def mlp_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """SwiGLU or GEGLU of gate and up [.., 2f] -> [.., f], or GELU."""
    if config.geglu:
        return partial(geglu, approximate=_gelu_kind(config))
    return swiglu if config.swiglu else gelu(config)


def swiglu(x: Tensor) -> Tensor:
    """SiLU(gate) x up of both side by side (arXiv 2002.05202): [.., 2f] -> [.., f]. Keeps its input alone."""
    if torch.compiler.is_compiling():
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(x)


def geglu(x: Tensor, approximate: str) -> Tensor:
    """GELU(gate) x up of both side by side (arXiv 2002.05202): [.., 2f] -> [.., f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grads = torch.empty_like(x)
        of_gate, of_up = grads.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=of_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=of_gate)
        return grads


def gelu(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """GELU, exact or OpenAI's tanh approximation."""
    return partial(F.gelu, approximate=_gelu_kind(config))


def dropout_add(config: ModelConfig) -> Callable[[Tensor, Tensor, float], Tensor]:
    """residual + dropout(x), as one compiled kernel with ``--bias-dropout-fusion``."""
    return _compiled(_dropout_add) if config.bias_dropout_fusion else _dropout_add


def _gelu_kind(config: ModelConfig) -> str:
    return "tanh" if config.openai_gelu else "none"


def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _dropout_add(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    return residual + (F.dropout(x, dropout) if dropout else x)


_compiled = cache(torch.compile)


def weight(config: ModelConfig, name: str) -> WeightInit:
    """Normal with deviation ``init_method_std``."""
    device = "cpu" if config.use_cpu_initialization else get_accelerator().current_device_name()
    return WeightInit(config.init_method_std, config.seed, name, device)


def adapter(
    config: ModelConfig, target: str, kind: Callable[..., nn.Module], *sizes: int, **arguments: Any
) -> nn.Module | None:
    """The adapter of the linear layer ``target``, of a ``kind`` and arguments as that; None if it has none."""
    if target not in config.adapted:
        return None
    settings = LowRank(config.lora_rank, config.lora_alpha / config.lora_rank, config.lora_dropout)
    return kind(*sizes, settings=settings, **arguments)


def residual_weight(config: ModelConfig, name: str) -> WeightInit:
    """Deviation divided by sqrt(2 x layers), for weights that write to the residual stream (GPT-2, section 2.3)."""
    whole = weight(config, name)
    return replace(whole, std=whole.std / math.sqrt(2 * config.num_layers))
