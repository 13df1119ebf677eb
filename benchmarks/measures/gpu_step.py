"""A training step on one GPU in half precision: this project and, one at a time, a plain torch model in the style of
nanoGPT, GPT-2 of transformers, and megatron-core where it is installed, in alternation.

125M, 345M and 1.3B parameters, as far as the GPU's memory allows: the micro-batch is halved until both models fit. This
project is also compared compiled, with --compile, with the plain model under torch.compile. The plain models keep fp32
weights and compute under autocast; this project and megatron-core have 16-bit weights and fp32 master weights, here at
ZeRO 1. All process the same number of tokens, which are on the device, clip gradients and step with Adam. bf16, or fp16
on a GPU that has no bf16. The share of the peak counts model FLOPs with attention in full. Peak memory is that of
building one model and taking two steps, above the memory allocated before.

No torch here: it would hold memory of the GPU.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comparing import Comparison, Quantity, Result, Times
from benchmarks.gpu.machine import Machine, checked, probe
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape
from megatron.common.errors import ResourceError, UserError
from megatron.tools.planning.machine import TERA, device_of_name

SHAPES = {
    "tiny": Shape(layers=2, hidden=64, heads=2, sequence=64, batch=2, vocabulary=512),
    "125M": Shape(layers=12, hidden=768, heads=12, sequence=1024, batch=16, vocabulary=50304),
    "345M": Shape(layers=24, hidden=1024, heads=16, sequence=1024, batch=8, vocabulary=50304),
    "1.3B": Shape(layers=24, hidden=2048, heads=16, sequence=2048, batch=4, vocabulary=50304),
}
DEFAULT = ("125M", "345M", "1.3B")
PAIRS = (
    ("suite", "bare torch"),
    ("suite", "transformers sdpa"),
    ("suite, compiled", "bare torch, compiled"),
    ("suite", "megatron-core"),
)
"""This project's way, and the other's."""
STEPS = 5
"""Of each way in a round."""
SECONDS = 900
"""A process that takes longer is ended."""


def measure(rounds: int, sizes: Sequence[str] = DEFAULT) -> list[Result]:
    """Every size and pair; what could not be measured is printed. Raises a UserError where there is no GPU."""
    machine, results = checked(probe(), Path.cwd()), []
    for size in sizes:
        for pair in PAIRS:
            try:
                results += compared(size, pair, rounds, machine)
            except UserError as error:
                print(f"{size}, {' and '.join(pair)}: left out: {error.messages[0]}")
    return results


def compared(size: str, pair: tuple[str, str], rounds: int, machine: Machine) -> list[Result]:
    """Speed and memory of both, in a process that ends afterwards.

    Raises ResourceError if something is not installed or does not fit, LaunchError if the process fails.
    """
    if absent := missing(pair, machine):
        raise ResourceError(absent)
    shape = fitting(SHAPES[size], machine.free)
    while True:
        request = {"shape": asdict(shape), "ways": pair, "rounds": rounds, "dtype": machine.dtype}
        found = measured_by_ranks(1, "gpu_step_ranks", json.dumps(request), time_limit=SECONDS)
        if "times" in found:
            return list(results_of(f"{size}, {machine.dtype}", shape, found, machine.devices[0].name))
        if shape.batch == 1:
            raise ResourceError(f"out of memory even with a micro-batch of 1 ({machine.devices[0].title})")
        shape = replace(shape, batch=shape.batch // 2)


def missing(pair: tuple[str, str], machine: Machine) -> str | None:
    """Why ``pair`` cannot be measured, if a package or compiler is missing."""
    for way, package in (("transformers sdpa", "transformers"), ("megatron-core", "megatron-core")):
        if way in pair and package not in machine.versions:
            return f"{package} is not installed"
    if "suite, compiled" in pair and ("triton" not in machine.versions or not machine.compiler):
        return "torch.compile needs Triton and a C compiler"
    return None


def bytes_needed(shape: Shape) -> float:
    """Estimate for two models in memory of which one trains: 20 bytes a parameter for this project and 18 for the other
    (weights in two precisions, gradients, two moments), activations of layers and logits, ZeRO's buffer of 1 GB, and
    the libraries."""
    per_token = 50 * shape.layers * shape.hidden + 12 * shape.vocabulary
    return 38 * shape.parameters + per_token * shape.tokens + 2.5e9


def fitting(shape: Shape, free: int) -> Shape:
    """``shape`` with the largest micro-batch that fits into so many bytes, halved as often as needed.

    Raises ResourceError if none does.
    """
    while bytes_needed(shape) > 0.95 * free:
        if shape.batch == 1:
            raise ResourceError(f"needs about {bytes_needed(shape) / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")
        shape = replace(shape, batch=shape.batch // 2)
    return shape


def results_of(title: str, shape: Shape, found: Mapping[str, Any], device: str) -> Iterator[Result]:
    """What ``gpu_step_ranks`` has measured, as results."""
    (way, ours), (peer, theirs) = ((name, Times(**times)) for name, times in found["times"].items())
    flops = shape.flops * STEPS / median(ours.wall)
    known = device_of_name(device)
    share = f"; {flops / TERA:,.0f} TFLOP/s, {flops / known.peak_flops:.1%} of the peak" if known else ""
    yield Comparison(f"{title}, {way}: {shape}{share}", peer, ours, theirs, shape.tokens * STEPS, "tokens")
    peaks = found["peaks"]
    yield Quantity(f"{title}, {way}, peak memory", peer, [peaks[way]], [peaks[peer]], "B")
