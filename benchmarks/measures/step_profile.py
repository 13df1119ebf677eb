"""Where the time of a training step goes, by kind of operator: this project and a plain torch model, at shape A.

torch's profiler adds up what each operator takes by itself. What is left of the step is spent between operators: in
Python, in autograd and in the engine; the profiler's own work is a part of it. The engines at two ZeRO stages are
compared with DeepSpeed's without this project around it, as in ``engines.py``. Of two ranks (``profile_ranks.py``) each
ZeRO stage and the pipeline are compared with torch's DDP, on rank 0, whose waiting for the other rank is mostly between
operators, too.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from itertools import repeat
from multiprocessing import get_context
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.comparing import Quantity, Result, timed
from benchmarks.measures.engines import BARE, steps_of
from benchmarks.measures.llama_step import BareLlama
from benchmarks.measures.peers import BareGPT2, plain_step
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import LLAMA_SHAPES, SHAPES
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout

MODELS = {"GPT-2": (SHAPES["A"], BareGPT2), "Llama": (LLAMA_SHAPES["A"], BareLlama)}
KINDS = {
    "attention": ("flash_attention", "scaled_dot_product", "bmm", "softmax_backward"),
    "matrix products": ("mm", "linear"),
    "AdamW": ("fused_adam",),
    "copies and casts": ("copy_", "cat"),
    "communication": ("c10d::",),
}
"""By parts of operators' names; the first that fits."""
OTHERS, BETWEEN, WHOLE = "other operators", "between operators", "the whole step"
STEPS, WARM_UP = 3, 3
ENGINES, MOST_ROUNDS = ("ZeRO 0", "ZeRO 2"), 3
"""Whose steps are longer, and so profiled in at most so many rounds."""


def measure(rounds: int) -> list[Result]:
    """GPT-2 and Llama, in fp32 and in bf16; two engines; two ranks."""
    silence_known_warnings()
    torch.manual_seed(1)
    results: list[Result] = []
    with (
        get_context("spawn").Pool(1, _as_users_start_it) as peer,
        distributed(run_of(SHAPES["A"]).parallel) as layout,
        deepspeed_silenced(verbose=False),
    ):
        for model in MODELS:
            for dtype in ("fp32", "bf16"):
                ours = _suite(model, dtype, layout)
                pairs = [(profiled(ours), peer.apply(_peer_profiled, (model, dtype))) for _ in range(rounds)]
                results += _rows(f"{model} A {dtype}", "bare torch", pairs)
    for name in ENGINES:
        with steps_of(name) as ways:
            engine, bare = (_warm(ways[kind]) for kind in ("suite", BARE))
            pairs = [(profiled(engine), profiled(bare)) for _ in range(min(rounds, MOST_ROUNDS))]
            results += _rows(f"engine, {name}", BARE, pairs)
    of_ranks = measured_by_ranks(2, "profile_ranks", str(rounds), OMP_NUM_THREADS="1")
    ddp = of_ranks.pop("DDP")
    for name, ours in of_ranks.items():
        results += _rows(f"two ranks, {name}", "torch's DDP", list(zip(ours, ddp, strict=True)))
    return results


def _rows(what: str, peer: str, pairs: list[tuple[dict[str, float], dict[str, float]]]) -> list[Result]:
    """A row for each kind that takes time, the whole step first."""
    sides = {
        kind: [[found[kind] for found in side] for side in zip(*pairs, strict=True)]
        for kind in (WHOLE, *KINDS, OTHERS, BETWEEN)
    }
    return [Quantity(f"{what}, {kind}", peer, *both, "s") for kind, both in sides.items() if all(map(all, both))]


def _suite(model: str, dtype: str, layout: ParallelLayout) -> Callable[[], Any]:
    shape, _ = MODELS[model]
    tokens, labels = (torch.randint(shape.vocabulary, (shape.batch, shape.sequence)) for _ in range(2))
    flags = ("--bf16", "--zero-stage", "1") if dtype == "bf16" else ()
    return _warm(engine_step(run_of(shape, *flags), layout, tokens, labels))


def _peer_profiled(model: str, dtype: str) -> dict[str, float]:
    """In the peer's process."""
    return profiled(_peer(model, dtype))


@cache
def _peer(model: str, dtype: str) -> Callable[[], Any]:
    shape, build = MODELS[model]
    batches = repeat(tuple(torch.randint(shape.vocabulary, (2, shape.batch, shape.sequence))))
    return _warm(plain_step(build(shape), batches, bf16=dtype == "bf16"))


def _as_users_start_it() -> None:
    os.environ.pop("THP_MEM_ALLOC_ENABLE", None)


def _warm(step: Callable[[], Any]) -> Callable[[], Any]:
    for _ in range(WARM_UP):
        step()
    return step


def profiled(step: Callable[[], Any], settle: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Seconds of a step by kind. ``settle`` waits for the other ranks before and after each."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        whole = sum(timed(step, settle).wall for _ in range(STEPS)) / STEPS
    return {
        **_by_kind({event.key: event.self_cpu_time_total for event in profiler.key_averages()}, whole),
        WHOLE: whole,
    }


def _by_kind(microseconds: Mapping[str, float], whole: float) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float, dict.fromkeys((*KINDS, OTHERS), 0.0))
    for name, time_of_all in microseconds.items():
        kinds = (kind for kind, parts in KINDS.items() if any(part in name for part in parts))
        if name.startswith(("aten::", "c10d::", "mkldnn::")):
            found[next(kinds, OTHERS)] += time_of_all / STEPS / 1e6
    return {**found, BETWEEN: whole - sum(found.values())}
