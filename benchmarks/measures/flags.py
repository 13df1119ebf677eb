"""Speedup from flags: the same run with and without them, in one process."""

import torch

from benchmarks.comparing import Comparison, alternate
from benchmarks.measures.shapes import SHAPES, Shape
from benchmarks.measures.suite import engine_step, run_of
from megatron.engines import deepspeed_silenced, silence_known_warnings
from megatron.launch.distributed import distributed
from megatron.parallel.layout import ParallelLayout

FEW_TOKENS = Shape(layers=4, hidden=768, heads=12, sequence=128, batch=1, vocabulary=512)
BF16 = ("--bf16", "--zero-stage", "1")
FLAGS = (
    ("--compile", SHAPES["A"], (), 1),
    ("--compile", SHAPES["A"], BF16, 1),
    ("--compile", SHAPES["B"], (), 1),
    ("--compile", SHAPES["B"], BF16, 1),
    ("--gradient-accumulation-fusion", FEW_TOKENS, (), 4),
    ("--gradient-accumulation-fusion", FEW_TOKENS, BF16, 4),
)
"""The flag, the shape, further flags, micro-batches of a step."""


def measure(rounds: int) -> list[Comparison]:
    """Each flag on its shape."""
    silence_known_warnings()
    with distributed(run_of(FEW_TOKENS).parallel) as layout, deepspeed_silenced(verbose=False):
        return [_compared(*row, rounds, layout) for row in FLAGS]


def _compared(
    flag: str, shape: Shape, further: tuple[str, ...], micro_batches: int, rounds: int, layout: ParallelLayout
) -> Comparison:
    tokens, labels = (torch.randint(shape.vocabulary, (shape.batch, shape.sequence)) for _ in range(2))
    ways = {
        name: engine_step(run_of(shape, *further, *flags, micro_batches=micro_batches), layout, tokens, labels)
        for name, flags in (("with", (flag,)), ("without", ()))
    }
    times = alternate(ways, rounds, warm_up=2)
    what = f"{flag}, {'bf16' if further else 'fp32'}: {shape}, {micro_batches} micro-batches a step"
    return Comparison(what, "without", times["with"], times["without"], shape.tokens * micro_batches, "tokens")
