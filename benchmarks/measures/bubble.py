"""The pipeline bubble that --trace measures with each schedule, compared with theory, with stages that sleep.

Sleeping ranks need no CPU time, so any machine can run them, and all passes take equally long: the difference between
measurement and theory is the overhead of the engine and the transfers. 90 ms forward, 180 ms backward, half of it for
the weights, divided by the model chunks of a stage. The compared value is the share of the time in which stages are
busy: for 1F1B m / (m + p - 1).
"""

import json
import tempfile
from pathlib import Path

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from megatron.launch.environment import free_port
from megatron.tools.reporting.files import read_timeline
from megatron.tools.reporting.timeline import measure as measure_timeline

PIPELINES = {
    2: (
        ("1f1b", 4, 1), ("1f1b", 8, 1), ("interleaved", 8, 2), ("zbh1", 8, 1), ("zbv", 8, 2), ("dualpipev", 8, 2),
    ),
    4: (
        ("1f1b", 4, 1), ("1f1b", 8, 1), ("1f1b", 16, 1), ("interleaved", 8, 2), ("interleaved", 8, 3), ("zbh1", 8, 1),
        ("zbv", 8, 2), ("dualpipev", 8, 2),
    ),
}  # fmt: skip
"""For each number of stages: schedule, micro-batches, and model chunks of each stage."""
FORWARD, BACKWARD = 0.09, 0.18
"""Seconds of a pass."""
MOST_ROUNDS = 2
"""Iterations that are traced at most: sleeping stages hardly differ from one to the next."""


def measure(rounds: int) -> list[Quantity]:
    """Every pipeline, in one start for each number of stages; the median of its traced iterations counts."""
    iterations = min(rounds, MOST_ROUNDS)
    return [quantity for stages in PIPELINES for quantity in _measured(stages, iterations)]


def _measured(stages: int, iterations: int) -> list[Quantity]:
    names = ("schedule", "micro_batches", "chunks")
    pipelines = [dict(zip(names, values, strict=True), stages=stages) for values in PIPELINES[stages]]
    with tempfile.TemporaryDirectory() as folder:
        for number, pipeline in enumerate(pipelines):
            pipeline |= {"folder": str(Path(folder, str(number))), "port": free_port()}
        settings = {"iterations": iterations, "forward": FORWARD, "backward": BACKWARD, "pipelines": pipelines}
        seconds = measured_by_ranks(stages, "sleeping_stages", json.dumps(settings), OMP_NUM_THREADS="1")
        return [_quantity(*pair) for pair in zip(pipelines, seconds, strict=True)]


def _quantity(pipeline: dict, seconds: float) -> Quantity:
    """``seconds``: of an iteration whose stages do not sleep."""
    found = measure_timeline(read_timeline(Path(pipeline["folder"])))
    chunks, schedule, micro_batches = pipeline["chunks"], pipeline["schedule"], pipeline["micro_batches"]
    kinds = 3 if schedule in ("zbh1", "zbv") else 2
    name = f"interleaved, {chunks} chunks per stage" if schedule == "interleaved" else schedule
    what = (
        f"{name}, {pipeline['stages']} stages, {micro_batches} micro-batches: bubble {found.bubble:.1%}, in theory "
        f"{found.theory:.1%}; without sleep {1000 * seconds / (chunks * micro_batches * kinds):.1f} ms per pass"
    )
    busy = [100 * (1 - found.bubble)], [100 * (1 - found.theory)]
    return Quantity(what, "theory", *busy, "% busy")
