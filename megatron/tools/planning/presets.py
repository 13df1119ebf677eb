"""Models and devices by name."""

import argparse
import math
import re
from typing import NamedTuple

from megatron.model.architectures import BERT, GPT2

GIB, GB, TERA = 2**30, 10**9, 10**12


class Model(NamedTuple):
    """The sizes of a model, and the entry script that trains it."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    program: str = GPT2.program


class Device(NamedTuple):
    """An accelerator and what joins it to others."""

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
    """What large matrix products reach of the peak."""
    accelerator: str = "cuda"
    peak_flops_fp32: float = 0.0
    """The same in fp32, which trains without tensor cores; 0: a sixteenth."""

    def flops(self, dtype: str) -> float:
        """Operations a second at most in ``dtype``: fp32, bf16 or fp16."""
        return self.peak_flops if dtype != "fp32" else self.peak_flops_fp32 or self.peak_flops / 16


MODELS: dict[str, Model] = {
    "345m": Model(24, 1024, 16, 1024),
    "1.3b": Model(24, 2048, 16, 2048),
    "13b": Model(40, 5120, 40, 2048),
    "175b": Model(96, 12288, 96, 2048),
    "1t": Model(128, 25600, 160, 2048),
    "bert-base": Model(12, 768, 12, 512, BERT.program),
    "bert-large": Model(24, 1024, 16, 512, BERT.program),
}

DEVICES: dict[str, Device] = {
    "v100": Device(32 * GB, 125 * TERA, 150 * GB, 12.5 * GB, 8, 0.45, peak_flops_fp32=15.7 * TERA),
    "a100": Device(80 * GB, 312 * TERA, 300 * GB, 25 * GB, 8, 0.62, peak_flops_fp32=19.5 * TERA),
    "h100": Device(80 * GB, 989 * TERA, 450 * GB, 50 * GB, 8, 0.55, peak_flops_fp32=67 * TERA),
    "h200": Device(141 * GB, 989 * TERA, 450 * GB, 50 * GB, 8, 0.55, peak_flops_fp32=67 * TERA),
    "b200": Device(180 * GB, 2250 * TERA, 900 * GB, 50 * GB, 8, 0.5, peak_flops_fp32=80 * TERA),
    # One core of the machine that the tests were written on; gloo's all-reduce for the links.
    "cpu": Device(8 * GB, 0.45 * TERA, 2 * GB, 0.1 * GB, 2, 0.5, accelerator="cpu", peak_flops_fp32=0.1 * TERA),
}
"""From the makers' data sheets: SXM modules, NVLink on a host, one network port of each device's own between hosts."""


_UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_BYTES = re.compile(r"([0-9.eE+]+?) *([KMGT]I?B)?", re.IGNORECASE)


def bytes_of_text(text: str) -> float:
    """A number of bytes with its unit, such as 80GB or 141 GiB."""
    match = _BYTES.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write one such as 80GB or 75GiB")
    return positive(match[1]) * _UNITS[(match[2] or "").upper()]


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def whole(text: str) -> int:
    """A whole number from 1 on."""
    value = positive(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
    return int(value)


def share(text: str) -> float:
    """A number from 0 on, below 1."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1, 1 excluded")
    return value


def in_words(size: float) -> str:
    """Bytes in the unit that fits them, such as 31.4 GB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} B"
