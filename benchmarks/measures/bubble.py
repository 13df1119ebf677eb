"""The bubble that --trace measures beside (p - 1) / (m + p - 1), on stages that sleep instead of computing.

Sleeping ranks need no processor, so any machine has enough of them, and every pass takes equally long: what is left
between measurement and formula is what DeepSpeed's engine and the transfers add. 100 ms forward, 200 ms backward. What
is compared is the share of the time in which stages are busy, m / (m + p - 1).
"""

import json
import tempfile
from pathlib import Path

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from megatron.tools.reporting.measure import measure as measure_timeline
from megatron.training.timeline import read_timeline

PIPELINES = ((2, 4), (2, 8), (4, 4), (4, 8), (4, 16))
"""Stages, and micro-batches."""
FORWARD, BACKWARD = 0.1, 0.2
"""Seconds of a pass."""


def measure(rounds: int) -> list[Quantity]:
    """Every pipeline in one start, of which as many iterations as ``rounds`` are traced; their median counts."""
    return [_measured(stages, micro_batches, rounds) for stages, micro_batches in PIPELINES]


def _measured(stages: int, micro_batches: int, rounds: int) -> Quantity:
    with tempfile.TemporaryDirectory() as folder:
        told = {"stages": stages, "micro_batches": micro_batches, "iterations": rounds, "folder": folder}
        measured_by_ranks(
            stages, "sleeping_stages", json.dumps({**told, "forward": FORWARD, "backward": BACKWARD}),
            OMP_NUM_THREADS="1",
        )  # fmt: skip
        found = measure_timeline(read_timeline(Path(folder)))
    what = (
        f"{stages} stages, {micro_batches} micro-batches: bubble {found.bubble:.1%}, by the formula {found.theory:.1%}"
    )
    busy = [100 * (1 - found.bubble)], [100 * (1 - found.theory)]
    return Quantity(what, "m / (m + p - 1)", *busy, "% busy", least=0.95, most=1.05)
