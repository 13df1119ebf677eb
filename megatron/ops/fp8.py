"""Linear layers in FP8: output and input gradient; the weight gradient stays in bf16.

A tensor is multiplied by a scale that brings its largest magnitude close to the maximum of its FP8 type. Scales are
powers of two, which makes the multiplication exact: quantized values hardly depend on which rows or ranks a scale is
computed from, so that all layouts agree.

r rows: all tokens of a rank, i inputs, o outputs
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.ops.linear import LinearKernel, linear_kernel

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
"""Types of weights, inputs and gradients: E5M2, with more range, for gradients with ``--fp8-format hybrid``."""
Share = Callable[[Tensor], Tensor]
"""Reduces a number to its maximum over the ranks that hold parts of one tensor."""


class Quantized(NamedTuple):
    """Rows in FP8, [n, k], and the factor for dequantization, [] or [n, 1] in fp32."""

    values: Tensor
    inverse_scale: Tensor


class Fp8LinearKernel(LinearKernel):
    """y = x W^T + b and the gradient of x, with quantized x, W and output gradient.

    A weight is quantized when it is first used, by row for the output and by column for the gradient of x, and cached
    until ``forget`` or a change of ``weight._version``. ZeRO's optimizers write to flat tensors that weights are views
    of, which does not change the version: the engine calls ``forget`` after a step.
    """

    has_own_gradients = True
    keeps_weights = True
    """Whether quantized weights are cached between calls; not at ZeRO 3, which gathers weights for each call."""
    quantizations = 0
    """How often the weight was quantized so far."""

    def __init__(self, config: ModelConfig, share: Share, *, is_column_parallel: bool):
        """``share`` reduces the scales of tensors that are sharded over the tensor-parallel ranks: the weight, and the
        output gradient of a column-parallel layer or the input of a row-parallel layer."""
        self.recipe = f"{config.fp8_format} {config.fp8_recipe}"
        self.is_rowwise = config.fp8_recipe == "rowwise"
        self.gradient_type = E5M2 if config.fp8_format == "hybrid" else E4M3
        self.in_bf16 = linear_kernel(config)()
        self.share = share
        self.share_input: Share = _not_shared if is_column_parallel else share
        self.share_gradient: Share = share if is_column_parallel else _not_shared
        self.forget()

    def forget(self) -> None:
        """Drop the cached quantized weight."""
        self._cached: dict[bool, tuple[int, Quantized]] = {}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = self._quantize(x.flatten(0, -2), E4M3, self.share_input)
        return self._output(rows, weight, bias).unflatten(0, x.shape[:-1])

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._input_gradient(self._quantize(grad, self.gradient_type, self.share_gradient), weight)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        return self.in_bf16.weight_gradient(grad, x, weight)

    def encoded(self, x: Tensor, *, is_gradient: bool = False) -> tuple[Tensor, ...]:
        """With row-wise scales: FP8 values [.., k] as bytes, which every backend can gather, and scales [.., 1]."""
        if not self.is_rowwise:
            return super().encoded(x, is_gradient=is_gradient)
        values, inverse_scale = quantize(x, self.gradient_type if is_gradient else E4M3, None)
        return values.view(torch.uint8), inverse_scale

    def forward_of(self, encoded: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self.is_rowwise:
            return super().forward_of(encoded, weight, bias)
        return self._output(_decoded(encoded, E4M3), weight, bias).unflatten(0, encoded[0].shape[:-1])

    def input_gradient_of(self, encoded: tuple[Tensor, ...], weight: Tensor) -> Tensor:
        if not self.is_rowwise:
            return super().input_gradient_of(encoded, weight)
        rows = _decoded(encoded, self.gradient_type)
        return self._input_gradient(rows, weight).unflatten(0, encoded[0].shape[:-1])

    def traced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``forward`` for torch.compile, which fuses the casts with surrounding operations; weights are not cached."""
        output: Tensor = _Traced.apply(x, weight, bias, self.is_rowwise, self.gradient_type)
        return output

    def _output(self, rows: Quantized, weight: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(rows, self._weight(weight, transposed=False), bias, is_gradient=False)

    def _input_gradient(self, rows: Quantized, weight: Tensor) -> Tensor:
        return multiply(rows, self._weight(weight, transposed=True), None, is_gradient=True)

    def _weight(self, weight: Tensor, *, transposed: bool) -> Quantized:
        """The quantized weight, [o, i] or transposed [i, o], so that the contracted dimension is the last."""
        version = weight._version
        cached_version, cached = self._cached.get(transposed, (None, None))
        if cached is not None and cached_version == version:
            return cached
        other_version, other = self._cached.get(not transposed, (None, None))
        if other is not None and other_version == version and not self.is_rowwise:
            quantized = Quantized(other.values.t().contiguous(), other.inverse_scale)
        else:
            self.quantizations += 1
            quantized = self._quantize(weight.t() if transposed else weight, E4M3, self.share)
        if self.keeps_weights:
            self._cached[transposed] = version, quantized
        return quantized

    def _quantize(self, rows: Tensor, dtype: torch.dtype, share: Share) -> Quantized:
        return quantize(rows, dtype, None if self.is_rowwise else share)


def kernel_of(recipe: str, share: Share, *, is_column_parallel: bool) -> LinearKernel:
    """A kernel with this ``recipe`` for a single call, which does not cache weights."""
    if not recipe:
        return LinearKernel()
    kernel = Fp8LinearKernel(_config(*recipe.split()), share, is_column_parallel=is_column_parallel)
    kernel.keeps_weights = False
    return kernel


@cache
def _config(fp8_format: str, fp8_recipe: str) -> ModelConfig:
    return ModelConfig(fp8_format=fp8_format, fp8_recipe=fp8_recipe)


class _Traced(torch.autograd.Function):
    """FP8 linear layer without tensor parallelism, in operations that torch.compile can trace."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_rowwise: bool, gradient_type: torch.dtype
    ) -> Tensor:
        ctx.share, ctx.gradient_type = None if is_rowwise else _not_shared, gradient_type
        largest = None if is_rowwise else largest_magnitude(weight)
        ctx.save_for_backward(x, weight, largest)
        rows = quantize(x.flatten(0, -2), E4M3, ctx.share)
        y = multiply(rows, quantize(weight, E4M3, ctx.share, largest), bias, is_gradient=False)
        return y.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, largest = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        quantized = quantize(rows, ctx.gradient_type, ctx.share), quantize(weight.t(), E4M3, ctx.share, largest)
        x_grad = multiply(*quantized, None, is_gradient=True).view_as(x)
        weight_grad = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return x_grad, weight_grad, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


def quantize(rows: Tensor, dtype: torch.dtype, share: Share | None, largest: Tensor | None = None) -> Quantized:
    """Quantize rows [.., k] to FP8, with one scale shared by ``share``, or a scale for each row if that is None.

    ``largest`` [] is the largest magnitude, if it is known already.
    """
    if share is None:
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True).float()
    elif largest is None:
        largest = share(largest_magnitude(rows))
    scale = (torch.finfo(dtype).max / largest.clamp(min=1e-12)).log2().floor().exp2()  # also for zeros
    return Quantized((rows * scale.to(rows.dtype)).to(dtype).contiguous(), scale.reciprocal())


def largest_magnitude(rows: Tensor) -> Tensor:
    """The largest magnitude of rows [.., k] -> [] in fp32.

    Computed by row first: torch.compile fuses the maximum of a row with its producer, but not a maximum of all rows.
    """
    return torch.linalg.vector_norm(rows, torch.inf, dim=-1).amax().float()


def _decoded(encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Quantized:
    """``Quantized`` rows from gathered bytes [.., k] and scales [.., 1]."""
    values, inverse_scale = (part.flatten(0, -2) for part in encoded)
    return Quantized(values.view(dtype), inverse_scale)


def multiply(rows: Quantized, weight: Quantized, bias: Tensor | None, *, is_gradient: bool) -> Tensor:
    """FP8 matmul: rows [r, k], weight [n, k], bias [n] -> [r, n] in bf16; gradients without fast accumulation."""
    product: Tensor = torch._scaled_mm(
        rows.values,
        weight.values.t(),
        scale_a=rows.inverse_scale,
        scale_b=weight.inverse_scale.t() if weight.inverse_scale.dim() else weight.inverse_scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=not is_gradient,
    )
    return product


def can_multiply(recipe: str, device: torch.device) -> bool:
    """Whether this torch supports FP8 matmuls with ``recipe`` on ``device``; torch 2.10 has no rowwise ones on CPU."""
    share = None if recipe == "rowwise" else _not_shared
    try:
        rows = quantize(torch.ones(16, 16, dtype=torch.bfloat16, device=device), E4M3, share)
        multiply(rows, rows, None, is_gradient=False)
    except RuntimeError:
        return False
    return True


def fp8_layers(module: nn.Module) -> list[tuple[nn.Module, Fp8LinearKernel]]:
    """The layers in ``module`` that compute in FP8."""
    kernels: list[tuple[nn.Module, Any]] = [(part, getattr(part, "kernel", None)) for part in module.modules()]
    return [(part, kernel) for part, kernel in kernels if isinstance(kernel, Fp8LinearKernel)]


def _not_shared(largest: Tensor) -> Tensor:
    return largest
