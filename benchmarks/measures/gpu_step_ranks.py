"""Started by ``benchmarks/gpu``: two ways of training a model take turns on one GPU, and their peaks of memory."""

import gc
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import repeat
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from benchmarks.comparing import alternate
from benchmarks.measures.megatron_core import MegatronProcess
from benchmarks.measures.peers import BareGPT2, plain_step, transformers_gpt2
from benchmarks.measures.ranks import report
from benchmarks.measures.shapes import STEPS, Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout

Step = Callable[[], Any]
Way = Callable[[ParallelLayout, Tensor, Tensor], Step | MegatronProcess]
"""Builds a model on the device; what takes one step of it over tokens and labels [b, s], or a process that does."""

SUITE = {
    "suite": "--zero-stage 1",
    "suite, compiled": "--zero-stage 1 --compile",
    "suite, FP8": "--zero-stage 1 --compile --fp8-format hybrid",
}
"""Flags of this project's ways."""


def main() -> None:
    """Read the request, and report times and peaks of both ways, or that they do not fit."""
    request = json.loads(sys.argv[1])
    shape = Shape(**request["shape"])
    built = ways(shape, request["dtype"])
    try:
        report(compared(shape, request["rounds"], {name: built[name] for name in request["ways"]}))
    except torch.OutOfMemoryError:
        report({"out of memory": True})


def ways(shape: Shape, dtype: str) -> dict[str, Way]:
    """All ways of training ``shape`` in ``dtype``, bf16 or fp16."""
    plain = partial(_plain, dtype=dtype)
    return {
        **{way: partial(_suite, shape, (f"--{dtype}", *flags.split())) for way, flags in SUITE.items()},
        "bare torch": lambda _, *batch: plain(BareGPT2(shape), *batch),
        "bare torch, compiled": lambda _, *batch: plain(BareGPT2(shape), *batch, compiled=True),
        "transformers sdpa": lambda _, *batch: plain(transformers_gpt2(shape, "sdpa"), *batch),
        "megatron-core": lambda *_: MegatronProcess(shape, dtype, STEPS),
    }


def compared(shape: Shape, rounds: int, ways: Mapping[str, Way]) -> dict[str, Any]:
    """Times of each round and peaks of memory of ``ways``, all of them in memory."""
    silence_known_warnings()
    accelerator = get_accelerator()
    peaks, rounds_of, processes = {}, {}, []
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
                if isinstance(step, MegatronProcess):
                    processes.append(step)
                    peaks[way], rounds_of[way] = step.peak, step.steps
                    continue
                step(), step()
            accelerator.synchronize()
            peaks[way], rounds_of[way] = accelerator.max_memory_allocated() - before, partial(_repeat, step)
        with deepspeed_silenced(verbose=False):
            times = alternate(rounds_of, rounds, settle=accelerator.synchronize)
        for process in processes:
            process.close()
    return {"times": {way: asdict(each) for way, each in times.items()}, "peaks": peaks}


def _suite(shape: Shape, flags: tuple[str, ...], layout: ParallelLayout, tokens: Tensor, labels: Tensor) -> Step:
    return engine_step(run_of(shape, *flags), layout, tokens, labels)


def _plain(model: torch.nn.Module, tokens: Tensor, labels: Tensor, *, dtype: str, compiled: bool = False) -> Step:
    model = model.to(tokens.device)
    model = torch.compile(model) if compiled else model
    return plain_step(model, repeat((tokens, labels)), bf16=dtype == "bf16", fp16=dtype == "fp16")


def _repeat(step: Step) -> None:
    for _ in range(STEPS):
        step()


if __name__ == "__main__":
    main()
