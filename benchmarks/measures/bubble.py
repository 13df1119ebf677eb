"""The pipeline bubble that --trace measures with each schedule, compared with theory, with stages that sleep.

Sleeping ranks need no CPU time, so any machine can run them, and all passes take equally long: the difference between
measurement and theory is the overhead of the engine and the transfers. 100 ms forward, 200 ms backward, half of it for
the weights, divided by the model chunks of a stage. The compared value is the share of the time in which stages are
busy: for 1F1B m / (m + p - 1).
"""

import json
import tempfile
from pathlib import Path

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from megatron.tools.reporting.files import read_timeline
from megatron.tools.reporting.timeline import measure as measure_timeline

PIPELINES = (
    ("1f1b", 2, 4, 1), ("1f1b", 2, 8, 1), ("1f1b", 4, 4, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 16, 1),
    ("interleaved", 2, 8, 2), ("interleaved", 4, 8, 2), ("interleaved", 4, 8, 3), ("zbh1", 2, 8, 1), ("zbh1", 4, 8, 1),
    ("zbv", 2, 8, 2), ("zbv", 4, 8, 2), ("dualpipev", 2, 8, 2), ("dualpipev", 4, 8, 2),
)  # fmt: skip
"""Schedule, stages, micro-batches, and model chunks of each stage."""
FORWARD, BACKWARD = 0.1, 0.2
"""Seconds of a pass."""


def measure(rounds: int) -> list[Quantity]:
    """Every pipeline in one start, of which as many iterations as ``rounds`` are traced; their median counts."""
    return [_measured(*pipeline, rounds) for pipeline in PIPELINES]


def _measured(schedule: str, stages: int, micro_batches: int, chunks: int, rounds: int) -> Quantity:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "schedule": schedule, "stages": stages, "micro_batches": micro_batches, "chunks": chunks,
            "iterations": rounds, "folder": folder,
        }  # fmt: skip
        measured_by_ranks(
            stages, "sleeping_stages", json.dumps({**settings, "forward": FORWARD, "backward": BACKWARD}),
            OMP_NUM_THREADS="1",
        )  # fmt: skip
        found = measure_timeline(read_timeline(Path(folder)))
    name = f"interleaved, {chunks} chunks per stage" if schedule == "interleaved" else schedule
    what = (
        f"{name}, {stages} stages, {micro_batches} micro-batches: bubble {found.bubble:.1%}, in theory "
        f"{found.theory:.1%}"
    )
    busy = [100 * (1 - found.bubble)], [100 * (1 - found.theory)]
    return Quantity(what, "theory", *busy, "% busy", least=0.95, most=1.05)
