"""A training step on one GPU in half precision: this project and, one at a time, a plain torch model in the style of
nanoGPT, GPT-2 of transformers, and megatron-core where it is installed, in alternation; and a profile of a step.

125M, 345M and 1.3B parameters, as far as the GPU's memory allows: the micro-batch is halved until both models fit. This
project is compared compiled, with --compile, with the plain model under torch.compile, and in FP8 with itself in bf16.
The plain models keep fp32 weights and compute under autocast; this project and megatron-core have 16-bit weights and
fp32 master weights, here at ZeRO 1. All process the same number of tokens, which are on the device, clip gradients and
step with Adam. bf16, or fp16 on a GPU that has no bf16. The share of the peak counts model FLOPs with attention in
full. Peak memory is that of building one model and taking two steps, above the memory allocated before.

No torch here: it would hold memory of the GPU.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from benchmarks.comparing import Comparison, Quantity, Result, Times
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import Plan, measured, named
from benchmarks.measures.shapes import STEPS, Shape
from benchmarks.tables import rows_of
from megatron.common.errors import ResourceError
from megatron.tools.planning.machine import TERA, device_of_name

SHAPES = {
    "tiny": Shape(layers=2, hidden=64, heads=2, sequence=64, batch=2, vocabulary=512),
    "125M": Shape(layers=12, hidden=768, heads=12, sequence=1024, batch=16, vocabulary=50304),
    "345M": Shape(layers=24, hidden=1024, heads=16, sequence=1024, batch=8, vocabulary=50304),
    "1.3B": Shape(layers=24, hidden=2048, heads=16, sequence=2048, batch=4, vocabulary=50304),
}
DEFAULT = ("125M", "345M", "1.3B")
COMPILED, FP8 = "suite, compiled", "suite, FP8"
PAIRS = (
    (COMPILED, "bare torch, compiled"),
    (FP8, COMPILED),
    ("suite", "bare torch"),
    ("suite", "transformers sdpa"),
    ("suite", "megatron-core"),
)
"""This project's way, and the other's; the first two are measured of all sizes before the others of any."""
GOALS = {("125M", COMPILED): 0.41, ("345M", COMPILED): 0.40, ("1.3B", COMPILED): 0.52, ("1.3B", FP8): 600 / 989}
"""Shares of the bf16 peak of an H100 or H200."""


def compared(plan: Plan, size: str, pair: tuple[str, str], machine: Machine) -> dict[str, Any]:
    """Speed and memory of both, in a process that ends afterwards.

    Raises ResourceError if something is not installed or does not fit, LaunchError if the process fails.
    """
    if absent := missing(pair, machine):
        raise ResourceError(absent)
    shape, device = fitting(SHAPES[size], machine.free), machine.devices[0]
    while True:
        request = {"shape": asdict(shape), "ways": pair, "rounds": plan.rounds, "dtype": machine.dtype}
        found = measured(plan, named("speed", size, *pair), "gpu_step_ranks", json.dumps(request))
        if "times" in found:
            rows = rows_of(list(results_of(f"{size}, {machine.dtype}", shape, found, device.name)))
            return {"rows": rows, "speeds": speeds_of(size, shape, found, device.name)}
        if shape.batch == 1:
            raise ResourceError(f"out of memory even with a micro-batch of 1 ({device.title})")
        shape = replace(shape, batch=shape.batch // 2)


def profiled(plan: Plan, size: str, way: str, machine: Machine) -> dict[str, Any]:
    """Torch's profile of a step of this project. Raises what ``compared()`` does."""
    if absent := missing((way,), machine):
        raise ResourceError(absent)
    shape, name = fitting(SHAPES[size], machine.free), named("profile", size, way)
    trace = plan.folder / f"{name}.json.gz"
    request = {"shape": asdict(shape), "way": way, "dtype": machine.dtype, "trace": str(trace)}
    found = measured(plan, name, "gpu_profile_ranks", json.dumps(request))
    return {"profile": found, "shape": str(shape), "trace": trace.name}


def missing(ways: Sequence[str], machine: Machine) -> str | None:
    """Why ``ways`` cannot be measured, if a package, a compiler or a kind of GPU is missing."""
    for way, package in (("transformers sdpa", "transformers"), ("megatron-core", "megatron-core")):
        if way in ways and package not in machine.versions:
            return f"{package} is not installed"
    if FP8 in ways and not machine.fp8:
        return "FP8 needs bf16 and a GPU of compute capability 8.9 or later"
    if {COMPILED, FP8} & {*ways} and not machine.compiles:
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


def speeds_of(size: str, shape: Shape, found: Mapping[str, Any], device: str) -> list[dict[str, Any]]:
    """Of each way: TFLOP/s, the share of the device's bf16 peak if it is known, and the goal on such a device."""
    known, speeds = device_of_name(device), []
    for way, times in found["times"].items():
        flops = shape.flops * STEPS / median(times["wall"])
        share, goal = (flops / known.peak_flops, GOALS.get((size, way))) if known else (None, None)
        goal = goal if known and known.peak_flops == 989 * TERA else None
        speeds.append({"size": size, "way": way, "tflops": flops / TERA, "share": share, "goal": goal})
    return speeds
