"""Variants for NVIDIA's GPUs, and what is known of one."""

from functools import cache

import torch

from megatron.ops.device import DeviceFacts


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of any ``device``, of which CUDA has more than its kind."""
    if device.type != "cuda" or torch.version.hip:
        return DeviceFacts("rocm" if torch.version.hip and device.type == "cuda" else device.type)
    capability = torch.get_device_module(device).get_device_capability(device)
    fused = torch.backends.cuda.is_flash_attention_available()
    return DeviceFacts("cuda", capability, fused, has_varlen=torch.__version__ >= "2.11")
