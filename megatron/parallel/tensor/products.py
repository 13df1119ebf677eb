"""Matrix products in fp32 on a CPU, by the faster of the two libraries that torch has: MKL and oneDNN.

MKL uses the widest instructions of Intel's processors only. On processors by AMD oneDNN takes half the time, but torch
itself passes it no products in fp32.

r rows, i inputs, o outputs
"""

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
_SMALL = 1 << 21
"""Multiplications, r i o, below which MKL is faster everywhere: a call of oneDNN takes longer."""
_TALL, _BLOCK = 8192, 2048
"""Rows of a transposed matrix from which on oneDNN takes half the time for blocks of so many rows."""


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [.., i], weight [o, i], bias [o] -> [.., o]. Like ``product``, without a gradient of its own."""
    if is_for_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def product(x: Tensor, y: Tensor) -> Tensor:
    """x [r, i] times y [i, o] -> [r, o]."""
    if not is_for_onednn(x, y.t()):
        return x @ y
    if x.size(0) < _TALL or x.is_contiguous():
        return affine(x, y.t())
    result = x.new_empty(x.size(0), y.size(1))
    for rows, block in zip(x.split(_BLOCK), result.split(_BLOCK), strict=True):
        block.copy_(affine(rows, y.t()))
    return result


def is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is faster for x [.., i] times the transpose of weight [o, i]."""
    is_fp32_on_cpu = x.dtype == torch.float32 and x.device.type == "cpu"
    return ONEDNN_IS_FASTER and is_fp32_on_cpu and x.numel() * weight.size(0) >= _SMALL
