"""Two ranks compared with torch's DistributedDataParallel: same model, same processes, same global batch.

DDP accumulates gradients over its micro-batches, reduces them in the last one, clips, and steps with fused AdamW. This
project trains data parallel at each ZeRO stage, and as a pipeline of two stages.
"""

from benchmarks.comparing import Comparison, Times
from benchmarks.measures.peers import Shape
from benchmarks.measures.ranks import measured_by_ranks

SHAPE = Shape(layers=4, hidden=384, heads=6, sequence=256, batch=1, vocabulary=512)
MICRO_BATCHES = 8
"""Of a step, of both ranks together."""
WAYS = {
    "ZeRO 0": (("--zero-stage", "0"), 0.98),
    "ZeRO 1": (("--zero-stage", "1"), 0.98),
    "ZeRO 2": (("--zero-stage", "2"), 0.93),
    "ZeRO 3": (("--zero-stage", "3"), 0.87),
    "PP 2": (("--pipe-parallel-size", "2"), 0.95 * MICRO_BATCHES / (MICRO_BATCHES + 1)),
}
"""Flags, and the least share of the peer's speed that is good enough."""


def measure(rounds: int) -> list[Comparison]:
    """All implementations; with a barrier before and after each, so that the slower rank's time counts."""
    found = measured_by_ranks(2, "ddp_ranks", str(rounds), OMP_NUM_THREADS="1")
    work = SHAPE.tokens * MICRO_BATCHES
    return [
        Comparison(f"{name}: {SHAPE}", "torch's DDP", Times(**ours), Times(**theirs), work, "tokens", WAYS[name][1])
        for name, (ours, theirs) in found.items()
    ]
