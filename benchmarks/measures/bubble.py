"""The pipeline bubble that --trace measures, compared with (p - 1) / (m + p - 1), with stages that sleep.

Sleeping ranks need no CPU time, so any machine can run them, and all passes take equally long: the difference between
measurement and formula is the overhead of DeepSpeed's engine and the transfers. 100 ms forward, 200 ms backward. The
compared value is the share of the time in which stages are busy, m / (m + p - 1).
"""

import json
import tempfile
from pathlib import Path

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from megatron.tools.reporting.files import read_timeline
from megatron.tools.reporting.timeline import measure as measure_timeline

PIPELINES = ((2, 4), (2, 8), (4, 4), (4, 8), (4, 16))
"""Stages, and micro-batches."""
FORWARD, BACKWARD = 0.1, 0.2
"""Seconds of a pass."""


def measure(rounds: int) -> list[Quantity]:
    """Every pipeline in one start, of which as many iterations as ``rounds`` are traced; their median counts."""
    return [_measured(stages, micro_batches, rounds) for stages, micro_batches in PIPELINES]


def _measured(stages: int, micro_batches: int, rounds: int) -> Quantity:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"stages": stages, "micro_batches": micro_batches, "iterations": rounds, "folder": folder}
        measured_by_ranks(
            stages, "sleeping_stages", json.dumps({**settings, "forward": FORWARD, "backward": BACKWARD}),
            OMP_NUM_THREADS="1",
        )  # fmt: skip
        found = measure_timeline(read_timeline(Path(folder)))
    what = (
        f"{stages} stages, {micro_batches} micro-batches: bubble {found.bubble:.1%}, by the formula {found.theory:.1%}"
    )
    busy = [100 * (1 - found.bubble)], [100 * (1 - found.theory)]
    return Quantity(what, "m / (m + p - 1)", *busy, "% busy", least=0.95, most=1.05)
