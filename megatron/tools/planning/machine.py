"""The devices and links that a layout is planned for."""

import re
from dataclasses import dataclass
from typing import NamedTuple

GB, TERA = 10**9, 10**12


class Device(NamedTuple):
    """An accelerator and its links."""

    memory: float
    """Bytes."""
    peak_flops: float
    """Dense 16-bit operations a second."""
    intra_bandwidth: float
    """Bytes a second from one device of a host to another, one way."""
    inter_bandwidth: float
    """Bytes a second from one device to another host's, one way."""
    per_node: int
    """Devices of the usual host."""
    efficiency: float = 0.6
    """Share of the peak that large matmuls reach."""
    accelerator: str = "cuda"
    peak_flops_fp32: float = 0.0
    """The same in fp32, which trains without tensor cores; 0: a sixteenth."""
    fp8_speedup: float = 1.0
    """Rate of a matmul in FP8 with one scale for each tensor, quantization included, relative to 16 bits;
    1 without FP8. torchao's for 4096 x 8192 x 16384."""
    memory_bandwidth: float = 0.0
    """Bytes a second."""
    attention: float = 0.6
    """Rate of flash attention relative to large matmuls."""
    touched: float = 2.0
    """Times that a pass reads or writes what a layer keeps, or its gradients, besides the matmuls."""
    quantized: float = 2.2
    """How often more with FP8, which scales and converts inputs of linear layers and gradients of their outputs."""

    def flops(self, dtype: str) -> float:
        """Operations a second at most in ``dtype``: fp32, bf16 or fp16."""
        return self.peak_flops if dtype != "fp32" else self.peak_flops_fp32 or self.peak_flops / 16


DEVICES: dict[str, Device] = {
    "v100": Device(
        32 * GB, 125 * TERA, 150 * GB, 12.5 * GB, 8, 0.45, peak_flops_fp32=15.7 * TERA, memory_bandwidth=900 * GB
    ),
    "v100-16gb": Device(
        16 * GB, 125 * TERA, 150 * GB, 12.5 * GB, 8, 0.45, peak_flops_fp32=15.7 * TERA, memory_bandwidth=900 * GB
    ),
    "a100": Device(
        80 * GB, 312 * TERA, 300 * GB, 25 * GB, 8, 0.62, peak_flops_fp32=19.5 * TERA, memory_bandwidth=2039 * GB
    ),
    "a100-40gb": Device(
        40 * GB, 312 * TERA, 300 * GB, 25 * GB, 8, 0.62, peak_flops_fp32=19.5 * TERA, memory_bandwidth=1555 * GB
    ),
    "a100-pcie": Device(
        80 * GB, 312 * TERA, 32 * GB, 25 * GB, 8, 0.62, peak_flops_fp32=19.5 * TERA, memory_bandwidth=1935 * GB
    ),
    "a100-pcie-40gb": Device(
        40 * GB, 312 * TERA, 32 * GB, 25 * GB, 8, 0.62, peak_flops_fp32=19.5 * TERA, memory_bandwidth=1555 * GB
    ),
    "h100": Device(
        80 * GB,
        989 * TERA,
        450 * GB,
        50 * GB,
        8,
        0.55,
        peak_flops_fp32=67 * TERA,
        fp8_speedup=1.39,
        memory_bandwidth=3350 * GB,
    ),
    "h100-pcie": Device(
        80 * GB,
        756 * TERA,
        64 * GB,
        50 * GB,
        8,
        0.55,
        peak_flops_fp32=51 * TERA,
        fp8_speedup=1.39,
        memory_bandwidth=2000 * GB,
    ),
    "h200": Device(
        141 * GB,
        989 * TERA,
        450 * GB,
        50 * GB,
        8,
        0.55,
        peak_flops_fp32=67 * TERA,
        fp8_speedup=1.39,
        memory_bandwidth=4800 * GB,
    ),
    "b200": Device(
        180 * GB,
        2250 * TERA,
        900 * GB,
        50 * GB,
        8,
        0.5,
        peak_flops_fp32=80 * TERA,
        fp8_speedup=1.39,
        memory_bandwidth=8000 * GB,
    ),
    # One core of the machine that the tests were written on; gloo's all-reduce for the links.
    "cpu": Device(
        8 * GB,
        0.45 * TERA,
        2 * GB,
        0.1 * GB,
        2,
        0.5,
        accelerator="cpu",
        peak_flops_fp32=0.1 * TERA,
        memory_bandwidth=10 * GB,
    ),
}
"""From the makers' data sheets: SXM modules, NVLink on a host, one network port of each device's own between hosts.

Cards (``pcie``) are taken to have no NVLink bridges.
"""


def device_of_name(name: str) -> Device | None:
    """The device that torch calls ``name``, such as ``NVIDIA A100-SXM4-40GB``; None if it is not in the table.

    The model, the form (``pcie``, ``nvl``) and, if the name states it, the size of the memory have to be the same.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    size = next((int(word[:-2]) * GB for word in words if re.fullmatch(r"\d+gb", word)), None)
    for known, device in DEVICES.items():
        model, *form = known.split("-")
        if model in words and words & _FORMS == _FORMS.intersection(form) and size in (None, device.memory):
            return device
    return None


_FORMS = {"pcie", "nvl"}
"""Words of a device's name that say that it is no SXM module."""


LINKS = 0.75
"""Share of a link's bandwidth that collectives reach."""


@dataclass(frozen=True)
class Machine:
    """Devices, ``per_node`` of them on a host."""

    device: Device
    per_node: int

    def bandwidth(self, span: int) -> float:
        """Bytes a second between ranks whose numbers are less than ``span`` apart."""
        return LINKS * (self.device.intra_bandwidth if span <= self.per_node else self.device.inter_bandwidth)
