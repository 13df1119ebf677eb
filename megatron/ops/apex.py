"""Variants from NVIDIA's apex, where it is installed."""

import importlib.util

from deepspeed.accelerator import get_accelerator
from torch import nn


def uses_apex(fused_kernels: str) -> bool:
    """Whether ``--fused-kernels`` selects apex on this machine."""
    found = get_accelerator().device_name() == "cuda" and importlib.util.find_spec("apex") is not None
    return fused_kernels == "apex" or (fused_kernels == "auto" and found)


def norms(*, fp32_residual: bool) -> dict[str, type[nn.Module]]:
    """apex's classes by the name of the norm; its parameters have torch's names."""
    from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

    if fp32_residual:
        return {"LayerNorm": MixedFusedLayerNorm, "RMSNorm": MixedFusedRMSNorm}
    return {"LayerNorm": FusedLayerNorm, "RMSNorm": FusedRMSNorm}
