"""The matmuls of linear layers in FP8: the output and the gradient of the input; the weight's gradient stays in bf16.

A tensor is multiplied by a scale that brings its largest magnitude near the largest number of its FP8 type. Scales are
powers of two: multiplying by them is exact, so that quantized values hardly depend on which rows or ranks a scale is
computed from, and layouts agree.

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
"""Of weights, inputs, and of gradients with ``--fp8-format e4m3``; of gradients with hybrid, which has more range."""
Share = Callable[[Tensor], Tensor]
"""A number -> its maximum over the ranks that hold parts of one tensor."""


class Quantized(NamedTuple):
    """Rows in FP8, [n, k], and what they are multiplied by to get the values back, [] or [n, 1] in fp32."""

    values: Tensor
    inverse_scale: Tensor


class Fp8LinearKernel(LinearKernel):
    """y = x W^T + b with x and W quantized to FP8, and so the gradient of x.

    A weight is quantized when it is first used, row by row for the output and column by column for the gradient of x,
    and kept until ``forget``, or until ``weight._version`` changes. The optimizer of ZeRO writes to flat tensors that
    weights are views of, which no version counts: the engine calls ``forget`` after a step.
    """

    has_own_gradients = True
    keeps_weights = True
    """Whether quantized weights are kept between calls; not at ZeRO 3, which gathers weights for each call."""
    quantizations = 0
    """Of the weight, so far."""

    def __init__(self, config: ModelConfig, share: Share, *, is_column_parallel: bool):
        """``share`` is for the scales of tensors that are divided over the tensor-parallel ranks: the weight, and the
        gradient of the output of a column-parallel layer or the input of a row-parallel one."""
        self.recipe = f"{config.fp8_format} {config.fp8_recipe}"
        self.is_rowwise = config.fp8_recipe == "rowwise"
        self.gradient_type = E5M2 if config.fp8_format == "hybrid" else E4M3
        self.in_bf16 = linear_kernel(config)()
        self.share = share
        self.share_input: Share = _own if is_column_parallel else share
        self.share_gradient: Share = share if is_column_parallel else _own
        self.forget()

    def forget(self) -> None:
        """Quantize the weight again when it is used next."""
        self._kept: dict[bool, tuple[int, Quantized]] = {}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = self._quantize(x.flatten(0, -2), E4M3, self.share_input)
        return self._output(rows, weight, bias).unflatten(0, x.shape[:-1])

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._input_gradient(self._quantize(grad, self.gradient_type, self.share_gradient), weight)

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        return self.in_bf16.weight_gradient(grad, x, weight)

    def encoded(self, x: Tensor, *, is_gradient: bool = False) -> tuple[Tensor, ...]:
        """With a scale for each row: FP8 values [.., k] as bytes, which every backend gathers, and scales [.., 1]."""
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
        """``forward`` for torch's compiler, which fuses casts with what is around them. Nothing is kept."""
        output: Tensor = _Traced.apply(x, weight, bias, self.is_rowwise, self.gradient_type)
        return output

    def _output(self, rows: Quantized, weight: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(rows, self._weight(weight, transposed=False), bias, is_gradient=False)

    def _input_gradient(self, rows: Quantized, weight: Tensor) -> Tensor:
        return multiply(rows, self._weight(weight, transposed=True), None, is_gradient=True)

    def _weight(self, weight: Tensor, *, transposed: bool) -> Quantized:
        """The weight, as [o, i] or transposed, [i, o]: in both cases the summed dimension of a matmul is the last."""
        version = weight._version
        kept_version, kept = self._kept.get(transposed, (None, None))
        if kept is not None and kept_version == version:
            return kept
        other_version, other = self._kept.get(not transposed, (None, None))
        if other is not None and other_version == version and not self.is_rowwise:
            found = Quantized(other.values.t().contiguous(), other.inverse_scale)
        else:
            self.quantizations += 1
            found = self._quantize(weight.t() if transposed else weight, E4M3, self.share)
        if self.keeps_weights:
            self._kept[transposed] = version, found
        return found

    def _quantize(self, rows: Tensor, dtype: torch.dtype, share: Share) -> Quantized:
        return quantize(rows, dtype, None if self.is_rowwise else share)


def kernel_of(recipe: str, share: Share, *, is_column_parallel: bool) -> LinearKernel:
    """A kernel with this ``recipe`` for one call: it keeps nothing."""
    if not recipe:
        return LinearKernel()
    kernel = Fp8LinearKernel(_config(*recipe.split()), share, is_column_parallel=is_column_parallel)
    kernel.keeps_weights = False
    return kernel


@cache
def _config(fp8_format: str, fp8_recipe: str) -> ModelConfig:
    return ModelConfig(fp8_format=fp8_format, fp8_recipe=fp8_recipe)


class _Traced(torch.autograd.Function):
    """The same without tensor parallelism, in operations that torch's compiler looks into."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, is_rowwise: bool, gradient_type: torch.dtype
    ) -> Tensor:
        ctx.share, ctx.gradient_type = None if is_rowwise else _own, gradient_type
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
        of_x = multiply(*quantized, None, is_gradient=True).view_as(x)
        of_weight = rows.t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None


def quantize(rows: Tensor, dtype: torch.dtype, share: Share | None, largest: Tensor | None = None) -> Quantized:
    """rows [.., k] in FP8 with one scale, whose largest magnitude is shared; or without ``share`` one for each row.

    ``largest`` [] is that magnitude where it is known.
    """
    if share is None:
        largest = torch.linalg.vector_norm(rows, torch.inf, dim=-1, keepdim=True).float()
    elif largest is None:
        largest = share(largest_magnitude(rows))
    scale = (torch.finfo(dtype).max / largest.clamp(min=1e-12)).log2().floor().exp2()  # also for zeros
    return Quantized((rows * scale.to(rows.dtype)).to(dtype).contiguous(), scale.reciprocal())


def largest_magnitude(rows: Tensor) -> Tensor:
    """rows [.., k] -> [] in fp32.

    Row by row: torch's compiler computes the maximum of a row where the row is made, and reads all again otherwise.
    """
    return torch.linalg.vector_norm(rows, torch.inf, dim=-1).amax().float()


def _decoded(encoded: tuple[Tensor, ...], dtype: torch.dtype) -> Quantized:
    """Bytes [.., k] and scales [.., 1] as rows."""
    values, inverse_scale = (part.flatten(0, -2) for part in encoded)
    return Quantized(values.view(dtype), inverse_scale)


def multiply(rows: Quantized, weight: Quantized, bias: Tensor | None, *, is_gradient: bool) -> Tensor:
    """rows [r, k], weight [n, k], bias [n] -> [r, n] in bf16. Tensor cores add up gradients in full precision."""
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
    """Whether this torch has the matmul for the scales of ``recipe``; torch 2.10 has none for rows on a CPU."""
    share = None if recipe == "rowwise" else _own
    try:
        rows = quantize(torch.ones(16, 16, dtype=torch.bfloat16, device=device), E4M3, share)
        multiply(rows, rows, None, is_gradient=False)
    except RuntimeError:
        return False
    return True


def fp8_layers(module: nn.Module) -> list[tuple[nn.Module, Fp8LinearKernel]]:
    """The layers in ``module`` that compute in FP8."""
    found: list[tuple[nn.Module, Any]] = [(part, getattr(part, "kernel", None)) for part in module.modules()]
    return [(part, kernel) for part, kernel in found if isinstance(kernel, Fp8LinearKernel)]


def _own(largest: Tensor) -> Tensor:
    return largest
