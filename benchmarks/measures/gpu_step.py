"""A training step on one GPU in bf16: this project, a plain torch model and GPT-2 of transformers, in alternation.

125M, 345M and 1.3B parameters. Each is also compiled: this project with --compile, the plain model with
torch.compile. The others keep fp32 weights and compute under autocast; this project has bf16 weights and fp32 master
weights, at ZeRO 1. All process the same tokens, which are on the device, clip gradients and step with fused AdamW.
The share of the peak counts model FLOPs with attention in full. Peak memory is that of building one model and taking
two steps, above the memory allocated before.
"""

import gc
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from benchmarks.comparing import Comparison, Quantity, Result, Times, alternate
from benchmarks.measures.peers import BareGPT2, Shape, plain_step, transformers_gpt2
from benchmarks.measures.suite import engine_step, run_of
from megatron.config.errors import ResourceError
from megatron.launch.distributed import distributed
from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings
from megatron.parallel.layout import ParallelLayout
from megatron.tools.planning.timing import DEVICES, TERA

SHAPES = {
    "125M": Shape(layers=12, hidden=768, heads=12, sequence=1024, batch=16, vocabulary=50304),
    "345M": Shape(layers=24, hidden=1024, heads=16, sequence=1024, batch=8, vocabulary=50304),
    "1.3B": Shape(layers=24, hidden=2048, heads=16, sequence=2048, batch=4, vocabulary=50304),
}
BF16 = ("--bf16", "--zero-stage", "1")
PEER_OF = {"suite": ("bare torch", "transformers sdpa"), "suite, compiled": ("bare torch, compiled",)}
STEPS = 5
"""Of each way in a round."""

Step = Callable[[], Any]
Way = Callable[[ParallelLayout, Tensor, Tensor], Step]
"""Builds a model on the device; what takes one step of it over tokens and labels [b, s]."""


def measure(rounds: int) -> list[Result]:
    """Every size. Raises ResourceError where there is no GPU."""
    if get_accelerator().device_name() == "cpu":
        raise ResourceError("gpu_step measures a GPU, and torch sees none here: run it on a machine that has one")
    results: list[Result] = []
    for name, shape in SHAPES.items():
        built = ways(shape)
        for way, peers in PEER_OF.items():
            try:
                results += compared(name, shape, rounds, {one: built[one] for one in (way, *peers) if one in built})
            except torch.OutOfMemoryError:
                print(f"{name}: {way} and its peers do not fit on this card together: left out")
    return results


def ways(shape: Shape) -> dict[str, Way]:
    """What is measured; transformers where it is installed."""
    found: dict[str, Way] = {
        "suite": partial(_suite, shape, BF16),
        "suite, compiled": partial(_suite, shape, (*BF16, "--compile")),
        "bare torch": lambda _, *batch: _plain(BareGPT2(shape), *batch),
        "bare torch, compiled": lambda _, *batch: _plain(BareGPT2(shape), *batch, compiled=True),
    }
    if importlib.util.find_spec("transformers"):
        found["transformers sdpa"] = lambda _, *batch: _plain(transformers_gpt2(shape, "sdpa"), *batch)
    else:
        print("transformers is not installed: left out")
    return found


def compared(name: str, shape: Shape, rounds: int, ways: Mapping[str, Way]) -> list[Result]:
    """Speeds and peaks of memory of one size: of the first of ``ways`` against the others, all of them in memory."""
    silence_known_warnings()
    accelerator = get_accelerator()
    peaks, steps = {}, {}
    with distributed(run_of(shape).parallel) as layout:
        tokens, labels = (
            torch.randint(shape.vocabulary, (shape.batch, shape.sequence), device=accelerator.current_device_name())
            for _ in range(2)
        )
        for way, build in ways.items():
            gc.collect()
            accelerator.empty_cache()
            accelerator.reset_peak_memory_stats()
            before = accelerator.memory_allocated()
            with deepspeed_silenced(verbose=False):
                step = build(layout, tokens, labels)
                step(), step()
            accelerator.synchronize()
            peaks[way], steps[way] = accelerator.max_memory_allocated() - before, partial(_repeat, step)
        with deepspeed_silenced(verbose=False):
            times = alternate(steps, rounds, settle=accelerator.synchronize)
    return list(_results(name, shape, times, peaks))


def _results(name: str, shape: Shape, times: Mapping[str, Times], peaks: Mapping[str, int]) -> Iterator[Result]:
    way, *peers = times
    what = f"{name}, {way}: {shape}{_share(shape, times[way])}"
    for peer in peers:
        yield Comparison(what, peer, times[way], times[peer], shape.tokens * STEPS, "tokens")
        yield Quantity(f"{name}, {way}, peak memory", peer, [peaks[way]], [peaks[peer]], "B")


def _share(shape: Shape, times: Times) -> str:
    """Of the peak that the card's maker names; nothing for a card that is not known."""
    flops = shape.flops * STEPS / median(times.wall)
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    peaks = [device.peak_flops for known, device in DEVICES.items() if known != "cpu" and known in name]
    return f"; {flops / TERA:,.0f} TFLOP/s, {flops / peaks[0]:.1%} of the peak" if peaks else ""


def _suite(shape: Shape, flags: tuple[str, ...], layout: ParallelLayout, tokens: Tensor, labels: Tensor) -> Step:
    return engine_step(run_of(shape, *flags), layout, tokens, labels)


def _plain(model: torch.nn.Module, tokens: Tensor, labels: Tensor, *, compiled: bool = False) -> Step:
    model = model.to(tokens.device)
    return plain_step(torch.compile(model) if compiled else model, repeat((tokens, labels)), bf16=True)


def _repeat(step: Step) -> None:
    for _ in range(STEPS):
        step()
