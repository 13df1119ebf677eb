"""Two ranks compared with torch's DistributedDataParallel: same model, same processes, same global batch.

DDP accumulates gradients over its micro-batches, reduces them in the last one, clips, and steps with fused AdamW. This
project trains data parallel at each ZeRO stage, and as a pipeline of two stages by each schedule. The same rounds time
DeepSpeed without this project around it, and torch's FSDP2, which shards as much as ZeRO 2 or 3 and reduces as often.
"""

from benchmarks.comparing import Comparison, Times
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape

SHAPE = Shape(layers=4, hidden=384, heads=6, sequence=256, batch=1, vocabulary=512)
MICRO_BATCHES = 8
"""Of a step, of both ranks together."""
RANKS = 2
OF_A_RANK = MICRO_BATCHES // RANKS
_ONCE = ("--zero-coalesce-grad-reduction",)
_PIPELINE, _SCHEDULE = ("--pipe-parallel-size", str(RANKS)), "--pipeline-schedule"
WAYS = {
    "ZeRO 0": ("--zero-stage", "0"),
    "ZeRO 1": ("--zero-stage", "1"),
    "ZeRO 2": ("--zero-stage", "2"),
    "ZeRO 2, reduced once": ("--zero-stage", "2", *_ONCE),
    "ZeRO 3": ("--zero-stage", "3"),
    "ZeRO 3, reduced once": ("--zero-stage", "3", *_ONCE),
    "PP 2": _PIPELINE,
    "PP 2, interleaved": (*_PIPELINE, _SCHEDULE, "interleaved", "--num-virtual-stages-per-pipeline-rank", "2"),
    "PP 2, zbh1": (*_PIPELINE, _SCHEDULE, "zbh1"),
    "PP 2, zbv": (*_PIPELINE, _SCHEDULE, "zbv"),
}
"""This project's flags."""
TOGETHER = (
    ("ZeRO 0",), ("ZeRO 1",), ("ZeRO 2", "ZeRO 2, reduced once"), ("ZeRO 3", "ZeRO 3, reduced once"),
    ("PP 2", "PP 2, interleaved", "PP 2, zbh1", "PP 2, zbv"),
)  # fmt: skip
"""Those that take turns with each other and with the same DDP."""


def measure(rounds: int) -> list[Comparison]:
    """All implementations; with a barrier before and after each, so that the slower rank's time counts."""
    found = measured_by_ranks(RANKS, "ddp_ranks", str(rounds), OMP_NUM_THREADS="1")
    return [
        Comparison(
            f"{name}: {SHAPE}", peer, Times(**seconds["suite"]), Times(**theirs), SHAPE.tokens * MICRO_BATCHES, "tokens"
        )
        for name, seconds in found.items()
        for peer, theirs in seconds.items()
        if peer != "suite"
    ]
