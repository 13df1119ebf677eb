"""What DeepSpeed's engines add to a plain loop over the same model: one process, 4 micro-batches a step.

The plain loop is forward, backward, clip and fused AdamW over the suite's own GPT-2; the engines are those a run
uses, by ZeRO stage, and the pipeline's with a single stage.
"""

import os
import socket
from itertools import repeat

import torch
from torch import Tensor, nn

from benchmarks.comparing import Comparison, alternate
from benchmarks.measures.peers import Shape, plain_step
from benchmarks.measures.suite import engine_step, run_of
from megatron.engine import build_module
from megatron.launch.quiet import deepspeed_silenced, silence_known_warnings
from megatron.mpu.layout import distributed

SHAPE = Shape(layers=6, hidden=384, heads=6, sequence=256, batch=2, vocabulary=512)
MICRO_BATCHES = 4
ENGINES = {
    "ZeRO 0": (("--zero-stage", "0"), 0.97),
    "ZeRO 1": (("--zero-stage", "1"), 0.97),
    "ZeRO 2": (("--zero-stage", "2"), 0.93),
    "ZeRO 3": (("--zero-stage", "3"), 0.88),
    "pipeline engine": (("--pipe-parallel-size", "1"), 0.97),
}
"""Flags, and the least share of the plain loop's speed that is good enough."""


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, weights: Tensor):
        super().__init__()
        self.model, self.weights = model, weights

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(tokens, (labels, self.weights))


def measure(rounds: int) -> list[Comparison]:
    """Every engine against the loop."""
    silence_known_warnings()
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))
    comparisons = []
    for name, (flags, goal) in ENGINES.items():
        run = run_of(SHAPE, *flags, micro_batches=MICRO_BATCHES)
        os.environ["MASTER_PORT"] = _free_port()  # the store of the engine before may still have the other
        with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
            plain = build_module(run_of(SHAPE), layout)
            loss = _Loss(plain, torch.full(labels.shape, 1 / labels.numel()))
            ways = {
                "suite": engine_step(run, layout, tokens, labels),
                "loop": plain_step(loss, repeat((tokens, labels)), bf16=False, micro_batches=MICRO_BATCHES),
            }
            times = alternate(ways, rounds)
        tokens_of_a_step = SHAPE.tokens * MICRO_BATCHES
        comparisons.append(
            Comparison(
                f"{name}: {SHAPE}", "plain loop", times["suite"], times["loop"], tokens_of_a_step, "tokens", goal
            )
        )
    return comparisons


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
