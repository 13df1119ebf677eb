"""Two processes of one thread each against one process of two threads: the same model, the same global batch.

Data parallel 2, tensor parallel 2, and two pipeline stages. The largest of the ranks' times counts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.comparing import Comparison, Times
from benchmarks.measures.peers import Shape

SHAPE = Shape(layers=4, hidden=384, heads=6, sequence=256, batch=1, vocabulary=512)
MICRO_BATCHES = 8
WAYS = {
    "one process, two threads": (1, ()),
    "DP 2": (2, ()),
    "TP 2": (2, ("--model-parallel-size", "2")),
    "PP 2": (2, ("--pipe-parallel-size", "2")),
}
GOALS = {"DP 2": 0.98, "TP 2": 0.85, "PP 2": 0.95 * MICRO_BATCHES / (MICRO_BATCHES + 1)}


def measure(rounds: int) -> list[Comparison]:
    """Every way in turn; each runs in processes of its own, a few steps a round."""
    times = {name: Times([], []) for name in WAYS}
    for number in range(rounds):
        names = list(WAYS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wall, cpu = _run(*WAYS[name])
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
    peer = times.pop("one process, two threads")
    work = SHAPE.tokens * MICRO_BATCHES
    return [
        Comparison(f"{name}: {SHAPE}", "one process, two threads", ours, peer, work, "tokens", GOALS[name])
        for name, ours in times.items()
    ]


def _run(ranks: int, flags: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of a step, by the clock and of all processors together."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), "-m", "benchmarks.measures.steps", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "2" if ranks == 1 else "1"}
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], env=environ, check=True, stdout=subprocess.PIPE)
    wall, cpu = json.loads(ended.stdout.splitlines()[-1])
    return wall, cpu
