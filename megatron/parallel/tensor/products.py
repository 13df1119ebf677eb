"""Matrix products in fp32 on a CPU, by the faster of the two libraries that torch has: MKL and oneDNN.

MKL uses the widest instructions of Intel's processors only. On processors by AMD oneDNN takes half the time, but torch
itself passes it no products in fp32.

r rows, i inputs, o outputs
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


def _is_by_amd() -> bool:
    """Whether the processor is, as far as the kernel says."""
    facts = Path("/proc/cpuinfo")
    return facts.exists() and "AuthenticAMD" in facts.read_text()


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
ONEDNN_IS_FASTER = HAS_ONEDNN and _is_by_amd()
ONEDNN_HAS_BF16 = ONEDNN_IS_FASTER and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether it is faster in bf16, too, for which processors need AVX-512: others would take a multiple of MKL's time."""
_SMALL = 1 << 21
"""Multiplications, r i o, below which MKL is faster everywhere: a call of oneDNN takes longer."""
_TALL, _BLOCK = 4096, 512
"""Rows from which on a transposed matrix, such as the gradient of all logits, is multiplied in blocks of so many rows:
oneDNN copies what it multiplies."""
_FLOPS_PROFILER = "deepspeed.profiling.flops_profiler.profiler"
"""The module whose function takes the place of ``F.linear`` while DeepSpeed counts operations; it sees no others."""


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [.., i], weight [o, i], bias [o] -> [.., o]. Like ``product``, without a gradient of its own."""
    if is_for_onednn(x, weight):
        bias = None if bias is None else bias.contiguous()  # torch reads another one wrongly
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x [r, i] times y [i, o] -> [r, o]."""
    if not is_for_onednn(x, y.t()):
        return x @ y
    if _is_one_block(x):
        return affine(x, y.t())
    return _by_blocks(x, y, x.new_empty(x.size(0), y.size(1)), Tensor.copy_)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add x [r, i] times y [i, o] to ``total`` [r, o]."""
    if is_for_onednn(x, y.t()):
        _by_blocks(x, y, total, Tensor.add_)
    else:
        total.addmm_(x, y)


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is faster for x [.., i] times the transpose of weight [o, i]."""
    if not (ONEDNN_IS_FASTER and x.dtype == torch.float32 and x.device.type == "cpu"):
        return False
    is_counted = getattr(F.linear, "__module__", "") == _FLOPS_PROFILER
    return x.numel() * weight.size(0) >= _SMALL and not (is_counted or torch.is_autocast_enabled("cpu"))


def _is_one_block(x: Tensor) -> bool:
    return x.is_contiguous() or len(x) < _TALL


def _by_blocks(x: Tensor, y: Tensor, result: Tensor, put: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``put`` every block of rows of the product into its place in ``result``."""
    size = len(x) if _is_one_block(x) else _BLOCK
    for rows, place in zip(x.split(size), result.split(size), strict=True):
        put(place, affine(rows, y.t()))
    return result
