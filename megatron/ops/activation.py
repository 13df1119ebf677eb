"""MLP activations and residual connection with dropout, in plain torch or as kernels of torch.compile.

f hidden size of the MLP
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
    """The activation function of the MLP: [.., f] -> [.., f]; gated: gate and up [.., 2f] -> [.., f]."""
    return _FUNCTIONS[config.activation](config)


def expert_activation(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The activation function for rows [n, ..] whose number n varies between steps.

    On the CPU torch computes GELU of contiguous inputs with oneDNN, which compiles a kernel for each size, slowly, and
    caches up to 1,024 of them: they fragment the heap, so that memory grows. GELU of transposed rows avoids oneDNN.
    """
    activation = mlp_activation(config)
    return activation if config.is_gated else lambda rows: activation(rows.t()).t()


def gelu(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """The GELU of the model: exact, OpenAI's tanh approximation, or CLIP's approximation."""
    if config.quick_gelu:
        return quick_gelu
    return partial(F.gelu, approximate=_gelu_kind(config))


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of GELU: x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


def bias_gelu(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor] | None:
    """GELU(x + bias) as one compiled kernel, or None without ``--bias-gelu-fusion``."""
    return partial(_compiled(_bias_gelu), approximate=_gelu_kind(config)) if config.bias_gelu_fusion else None


def dropout_add(config: ModelConfig) -> Callable[[Tensor, Tensor, float], Tensor]:
    """residual + dropout(x), as one compiled kernel with ``--bias-dropout-fusion``."""
    return _compiled(_dropout_add) if config.bias_dropout_fusion else _dropout_add


def geglu(x: Tensor, approximate: str) -> Tensor:
    """GELU(gate) x up, of gate and up in one tensor (arXiv 2002.05202): [.., 2f] -> [.., f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def swiglu(x: Tensor) -> Tensor:
    """SiLU(gate) x up, of gate and up in one tensor (arXiv 2002.05202): [.., 2f] -> [.., f]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def lean_swiglu(x: Tensor) -> Tensor:
    """SwiGLU that saves only its input for the backward pass, and recomputes SiLU(gate)."""
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
        gate_grad, up_grad = grads.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        return grads


def recomputed(output: Tensor, function: Callable[[Tensor], Tensor], x: Tensor) -> AbstractContextManager[None]:
    """A context in which autograd saves x instead of ``output`` = function(x), and recomputes it when needed."""
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
"""Activation name (``ModelConfig.activation``) to its function."""
