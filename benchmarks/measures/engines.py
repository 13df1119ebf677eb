"""Overhead of the engines over a plain loop with the same model, and this project's share of it, in one process.

The plain loop is forward, backward, clip and fused AdamW over this project's GPT-2, 4 micro-batches per step. The
engines are those of a run, at each ZeRO stage, and the pipeline engine with a single stage. Bare DeepSpeed is the same
engine over the same model without this project around it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import torch

from benchmarks.comparing import Comparison, alternate
from benchmarks.measures.peers import Shape, WithWeights, plain_step
from benchmarks.measures.suite import bare_step, engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.engines.build import build_module
from megatron.launch.distributed import distributed
from megatron.launch.environment import free_port

SHAPE = Shape(layers=6, hidden=384, heads=6, sequence=256, batch=2, vocabulary=512)
MICRO_BATCHES = 4
ENGINES = {
    "ZeRO 0": ("--zero-stage", "0"),
    "ZeRO 1": ("--zero-stage", "1"),
    "ZeRO 2": ("--zero-stage", "2"),
    "ZeRO 3": ("--zero-stage", "3"),
    "pipeline engine": ("--pipe-parallel-size", "1"),
}


def measure(rounds: int) -> list[Comparison]:
    """Every engine against the loop, and against DeepSpeed's engine by itself."""
    comparisons = []
    for name in ENGINES:
        with _steps(name) as ways:
            times = alternate(ways, rounds)
        ours = times.pop("suite")
        comparisons += [
            Comparison(f"{name}: {SHAPE}", peer, ours, theirs, SHAPE.tokens * MICRO_BATCHES, "tokens")
            for peer, theirs in times.items()
        ]
    return comparisons


@contextmanager
def _steps(name: str) -> Iterator[dict[str, Callable[[], Any]]]:
    """A step of that engine, of the loop, and of DeepSpeed's engine by itself."""
    silence_known_warnings()
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))
    run = run_of(SHAPE, *ENGINES[name], micro_batches=MICRO_BATCHES)
    os.environ["MASTER_PORT"] = str(free_port())  # the store of the engine before may still have the other
    with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
        plain = WithWeights(build_module(run_of(SHAPE), layout), labels)
        yield {
            "suite": engine_step(run, layout, tokens, labels),
            "plain loop": plain_step(plain, repeat((tokens, labels)), bf16=False, micro_batches=MICRO_BATCHES),
            "bare DeepSpeed": bare_step(run, layout, tokens, labels),
        }
