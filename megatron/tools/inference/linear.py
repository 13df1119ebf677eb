"""Products with a weight that does not change, by the faster of the two libraries that torch has for a CPU in fp32.

MKL reads a weight in any order, and is up to three times as fast for few rows if it is stored by inputs. oneDNN reads a
packed copy. Which of them is faster depends on the number of rows, the size of the weight, and the processor.

i inputs, o outputs
"""

import sys
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.parallel.tensor.products import HAS_ONEDNN, ONEDNN_IS_FASTER

_LARGE = 1 << 19
"""Elements of a weight from which on it does not stay in the processor's caches from step to step."""
_FEW = 64
"""Rows, such as those of several texts in a step."""
_PACKED_FOR = 8
"""Rows that the order of a packed weight is best for; any number may be multiplied with it."""


class InferenceLinear:
    """x [.., i] -> x W^T + b [.., o], without gradients. The packed copy of W [o, i] is made when it is first used."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self._weight, self._bias = weight.detach(), None if bias is None else bias.detach()
        self._packed_rows = packed_rows(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() // x.size(-1) in self._packed_rows:
            return torch.ops.mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)

    @cached_property
    def _packed(self) -> Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous(), _PACKED_FOR)
        if 1 in self._packed_rows:
            self._weight = self._weight.new_empty(0)  # no number of rows needs it
        return packed


def packed_rows(weight: Tensor) -> range:
    """The numbers of rows of x for which oneDNN is faster. MKL uses all instructions of a processor on Intel's only."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not HAS_ONEDNN:
        return range(0)
    is_large = weight.numel() >= _LARGE
    if ONEDNN_IS_FASTER:
        return range(1 if is_large else 2, sys.maxsize)
    return range(3, _FEW + 1) if is_large else range(0)


def stored_by_inputs(weight: Tensor) -> Tensor:
    """``weight`` [.., o, i], on a CPU in fp32 with its elements in the order [i, .., o]."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return weight
    return weight.flatten(0, -2).t().contiguous().t().unflatten(0, weight.shape[:-1])
