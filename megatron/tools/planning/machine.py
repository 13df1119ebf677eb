"""The devices and links that a layout is planned for."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Rate of a matmul in FP8 relative to 16 bits, without quantization; 1 without FP8."""
    memory_bandwidth: float = 1e12
    """Bytes a second."""
    attention: float = 0.6
    """Rate of flash attention relative to large matmuls."""
    touched: float = 2.0
    """Times that a pass reads or writes what a layer keeps, or its gradients, besides the matmuls."""
    quantized: float = 2.2
    """How often more with FP8, which scales and converts inputs of linear layers and gradients of their outputs."""

    processors: int = 0
    """Multiprocessors, each of which computes a tile of a matmul at a time; 0: matmuls of any shape are as fast."""
    joined: bool = True
    """Whether projections of the same input are one matmul: query, key and value, gate and up."""
    remote: float = 1.0
    """Time of attention to the keys of another rank of a ring relative to a rank's own."""

    def flops(self, dtype: str) -> float:
        """Operations a second at most in ``dtype``: fp32, bf16 or fp16."""
        return self.peak_flops if dtype != "fp32" else self.peak_flops_fp32 or self.peak_flops / 16


def _device(
    memory: int,
    peak: float,
    peak_fp32: float,
    bandwidth: float,
    links: tuple[float, float],
    efficiency: float,
    **more: Any,
) -> Device:
    """In GB, TFLOP/s and GB/s; ``links`` are those on a host and between hosts."""
    intra, inter = (link * GB for link in links)
    rates = {"peak_flops_fp32": peak_fp32 * TERA, "memory_bandwidth": bandwidth * GB}
    return Device(memory * GB, peak * TERA, intra, inter, **{"per_node": 8, "efficiency": efficiency, **rates, **more})


DEVICES: dict[str, Device] = {
    "v100": _device(32, 125, 15.7, 900, (150, 12.5), 0.45, processors=80),
    "v100-16gb": _device(16, 125, 15.7, 900, (150, 12.5), 0.45, processors=80),
    "a100": _device(80, 312, 19.5, 2039, (300, 25), 0.635, processors=108),
    "a100-40gb": _device(40, 312, 19.5, 1555, (300, 25), 0.635, processors=108),
    "a100-pcie": _device(80, 312, 19.5, 1935, (32, 25), 0.635, processors=108),
    "a100-pcie-40gb": _device(40, 312, 19.5, 1555, (32, 25), 0.635, processors=108),
    "h100": _device(80, 989, 67, 3350, (450, 50), 0.62, fp8_speedup=1.8, processors=132),
    "h100-pcie": _device(80, 756, 51, 2000, (64, 50), 0.62, fp8_speedup=1.8, processors=114),
    "h200": _device(141, 989, 67, 4800, (450, 50), 0.62, fp8_speedup=1.8, processors=132),
    "b200": _device(180, 2250, 80, 8000, (900, 50), 0.54, fp8_speedup=1.8, processors=148),
    # One core of the machine that the tests were written on; gloo's all-reduce for the links.
    "cpu": _device(8, 0.45, 0.1, 10, (2, 0.1), 0.5, per_node=2, accelerator="cpu"),
}
"""From the makers' data sheets: SXM modules, NVLink on a host, one network port of each device's own between hosts.

Cards (``pcie``) are taken to have no NVLink bridges. Efficiencies are those of papers for V100 and A100, and for H100
and H200 that of a step of 1.3B parameters on one H200, which was 512 TFLOP/s, and 557 in FP8.
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
