"""Norms; they differ in the data type of the output."""

import torch
from torch import nn
from torch.nn import functional as F


class FusedLayerNorm(nn.Module):
    """Its output has the type of the input."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False):
        super().__init__()
        self.normalized_shape = torch.Size([normalized_shape])
        self.eps = eps
        assert elementwise_affine
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))

    def forward(self, input):
        """Normalize in fp32."""
        return self._normalized(input).to(input.dtype)

    def _normalized(self, input):
        return F.layer_norm(input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Its output has the type of the weights."""

    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **kwargs):
        super().__init__(normalized_shape, eps=eps, **kwargs)

    def forward(self, input):
        """Normalize in fp32."""
        return self._normalized(input).to(self.weight.dtype)


class FusedRMSNorm(nn.Module):
    """Its output has the type of the input."""

    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False):
        super().__init__()
        self.normalized_shape = torch.Size([normalized_shape])
        self.eps = eps
        assert elementwise_affine
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))

    def forward(self, input):
        """Normalize in fp32."""
        return self._normalized(input).to(input.dtype)

    def _normalized(self, input):
        return F.rms_norm(input.float(), self.normalized_shape, self.weight.float(), self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """Its output has the type of the weights."""

    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **kwargs):
        super().__init__(normalized_shape, eps=eps, **kwargs)

    def forward(self, input):
        """Normalize in fp32."""
        return self._normalized(input).to(self.weight.dtype)
