"""Activations of the MLP and the residual connection with dropout, plain or as a kernel of torch's compiler.

f columns of the MLP
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from megatron.config import ModelConfig


def mlp_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """[.., f] -> [.., f], or a gated one: gate and up [.., 2f] -> [.., f]."""
    return _FUNCTIONS[config.activation](config)


def expert_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """``mlp_activation`` for rows [n, ..] whose number n changes in every step.

    On the CPU torch passes a contiguous input of GELU to oneDNN, which compiles a kernel for each size, slowly, and
    keeps up to 1,024: they lie between the large blocks that a step frees, so that memory grows. torch itself computes
    GELU of transposed rows.
    """
    activation = mlp_activation(config)
    return activation if config.is_gated else lambda rows: activation(rows.t()).t()


def gelu(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """GELU, exact, OpenAI's tanh approximation, or CLIP's."""
    if config.quick_gelu:
        return quick_gelu
    return partial(F.gelu, approximate=_gelu_kind(config))


def quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def bias_gelu(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
    """GELU(x + bias) as one compiled kernel, or None without ``--bias-gelu-fusion``."""
    return partial(_compiled(_bias_gelu), approximate=_gelu_kind(config)) if config.bias_gelu_fusion else None


def dropout_add(config: ModelConfig) -> Callable[[Tensor, Tensor, float], Tensor]:
    """residual + dropout(x), as one compiled kernel with ``--bias-dropout-fusion``."""
    return _compiled(_dropout_add) if config.bias_dropout_fusion else _dropout_add


def geglu(x: Tensor, approximate: str) -> Tensor:
    """GELU(gate) x up of both in one tensor (arXiv 2002.05202): [.., 2f] -> [.., f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def swiglu(x: Tensor) -> Tensor:
    """SiLU(gate) x up of both in one tensor (arXiv 2002.05202): [.., 2f] -> [.., f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def lean_swiglu(x: Tensor) -> Tensor:
    """SwiGLU that saves only its input for the backward pass, on every device, and not SiLU(gate) as well."""
    return _SwiGLU.apply(x)


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


def recomputed(output: Tensor, function: Callable[[Tensor], Tensor], x: Tensor) -> AbstractContextManager[None]:
    """Inside, autograd keeps x in place of ``output``, which is function(x) and is computed again when it is needed."""
    storage, x = StorageWeakRef(output.untyped_storage()), x.detach()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        is_output = StorageWeakRef(saved.untyped_storage()) == storage and saved.is_contiguous()
        return saved.shape if is_output else saved

    def unpack(saved: Tensor | torch.Size) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return function(x).view(saved)

    return saved_tensors_hooks(pack, unpack)


def _gelu_kind(config: ModelConfig) -> str:
    return "tanh" if config.openai_gelu else "none"


def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _dropout_add(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    return residual + (F.dropout(x, dropout) if dropout else x)


_compiled = cache(torch.compile)
_FUNCTIONS: Mapping[str, Callable[[ModelConfig], Callable[[Tensor], Tensor]]] = {
    "gelu": gelu,
    "swiglu": lambda config: swiglu if config.compile else lean_swiglu,
    "geglu": lambda config: partial(geglu, approximate=_gelu_kind(config)),
}
"""The function of each activation of a model."""
