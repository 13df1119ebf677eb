"""Devices and links that layouts are planned for, with a table of known accelerators."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

GB, TERA = 10**9, 10**12


class Device(NamedTuple):
    """An accelerator and its links."""

    memory: float
    """Memory in bytes."""
    peak_flops: float
    """Peak dense 16-bit FLOP/s."""
    intra_bandwidth: float
    """Bytes/s between two devices of a host, one way."""
    inter_bandwidth: float
    """Bytes/s from a device to a device of another host, one way."""
    per_node: int
    """Number of devices of a typical host."""
    efficiency: float = 0.6
    """Share of the peak that large matmuls reach."""
    accelerator: str = "cuda"
    peak_flops_fp32: float = 0.0
    """Peak fp32 FLOP/s without tensor cores; 0: a sixteenth of ``peak_flops``."""
    fp8_speedup: float = 1.0
    """Rate of FP8 matmuls relative to 16 bits, without quantization; 1 without FP8."""
    memory_bandwidth: float = 1e12
    """Bytes/s."""
    attention: float = 0.6
    """Rate of flash attention relative to large matmuls."""
    touched: float = 2.0
    """Reads or writes of kept activations, or their gradients, per pass, outside of matmuls."""
    quantized: float = 2.2
    """Additional reads or writes with FP8, for scaling and casting inputs and output gradients of linear layers."""

    processors: int = 0
    """Number of multiprocessors, each of which computes a tile at a time; 0: the shape of matmuls does not matter."""
    joined: bool = True
    """Whether projections of the same input are one matmul: query, key and value; gate and up."""
    remote: float = 1.0
    """Time of ring attention to the keys of another rank relative to a rank's own keys."""

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in ``dtype``: fp32, bf16 or fp16."""
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
    """A device from values in GB, TFLOP/s and GB/s; ``links`` are the bandwidths within and between hosts."""
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
"""Known devices, from vendors' data sheets: SXM modules, NVLink within a host, one network port per device.

PCIe cards (``pcie``) are assumed to have no NVLink bridges. Efficiencies are from papers for V100 and A100; for H100
and H200 from a training step of a 1.3B model on one H200, with 512 TFLOP/s, and 557 in FP8.
"""


def device_of_name(name: str) -> Device | None:
    """The device with this name in torch, such as ``NVIDIA A100-SXM4-40GB``; None if it is not in the table.

    Model, form factor (``pcie``, ``nvl``) and, if the name states it, memory size must match.
    """
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    size = next((int(word[:-2]) * GB for word in words if re.fullmatch(r"\d+gb", word)), None)
    for known, device in DEVICES.items():
        model, *form = known.split("-")
        if model in words and words & _FORMS == _FORMS.intersection(form) and size in (None, device.memory):
            return device
    return None


_FORMS = {"pcie", "nvl"}
"""Form factors other than SXM modules in the names of devices."""


MACHINE_INTERVALS = {
    "devices_per_node": "[1, inf)",
    "headroom": "[0, 1)",
    "peak_tflops": "[1e-6, 1e6]",
    "intra_bandwidth": "[1e-6, 1e6]",
    "inter_bandwidth": "[1e-6, 1e6]",
}
"""The intervals of the flags that describe a machine."""


LINKS = 0.75
"""Share of a link's bandwidth that collectives reach."""


@dataclass(frozen=True)
class Machine:
    """A cluster of ``device`` with ``per_node`` devices per host."""

    device: Device
    per_node: int

    def bandwidth(self, span: int) -> float:
        """Bytes/s between ranks whose numbers differ by less than ``span``."""
        return LINKS * (self.device.intra_bandwidth if span <= self.per_node else self.device.inter_bandwidth)
