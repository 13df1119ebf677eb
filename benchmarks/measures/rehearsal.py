"""A rehearsed rank beside the real one: the step of two ranks, their CPU time, and the peak of memory.

Both ranks are rehearsed at the same time, since two real ones share caches and memory, too. Communication is measured:
two real ranks repeat each operation that the rehearsed ones issue. By CPU time, ranks are compared one by one and what
waits for another rank does not count, so that a busy machine disturbs it less.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import ROOT, measured_by_ranks
from benchmarks.measures.shapes import Shape

SHAPE = Shape(layers=4, hidden=256, heads=4, sequence=128, batch=4, vocabulary=8192)
LAYOUTS = {
    "TP 2": ("--model-parallel-size", "2"),
    "PP 2": ("--pipe-parallel-size", "2"),
    "DP 2, ZeRO 1": ("--zero-stage", "1"),
    "CP 2": ("--context-parallel-size", "2"),
    "EP 2": ("--num-experts", "4", "--expert-model-parallel-size", "2"),
}
MICRO_BATCHES = 4


def measure(rounds: int) -> list[Quantity]:
    """Every layout, with so many timed iterations."""
    from megatron.cli import parse_run
    from megatron.tools.planning.machine import DEVICES, Machine
    from megatron.tools.rehearsal.estimate import Expected
    from megatron.training.preflight import check

    results = []
    for name, flags in LAYOUTS.items():
        words = [*SHAPE.words, *flags, *f"--gas {MICRO_BATCHES} --vocab-size {SHAPE.vocabulary}".split()]
        words += "--mock-data --train-iters 1000 --num-workers 0".split()
        rehearsed = _rehearsed(words, rounds)
        real, communication = _real(words, rounds), _communication(words, rehearsed)
        for rank, measured in zip(rehearsed, communication, strict=True):
            rank["communication"] = measured
        run, _ = check(parse_run(words, {"WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}))
        expected = Expected(run, Machine(DEVICES["cpu"], 2), rehearsed)
        what = f"{name}: {SHAPE}"
        step = max(rank["seconds"]["wall"] for rank in real)
        results.append(Quantity(what, "rehearsed step with measured communication", [step], [expected.seconds], "s"))
        cpu = [rank["seconds"]["cpu"] for rank in real], [_cpu_seconds(rank) for rank in rehearsed]
        results.append(Quantity(what, "rehearsed rank, CPU time of a step", *cpu, "s"))
        peaks = ([float(rank["memory_bytes"]["peak"]) for rank in ranks] for ranks in (real, rehearsed))
        results.append(Quantity(what, "rehearsed peak of live tensors", *peaks, "B"))
    return results


def _rehearsed(words: list[str], steps: int) -> list[dict[str, Any]]:
    """Both ranks, as ``tools/rehearse.py`` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        of_tool = [sys.executable, "tools/rehearse.py", "--world-size", "2", "--steps", str(steps), "--device", "cpu"]
        processes = [
            subprocess.Popen(
                [*of_tool, "--rank", file.name, "--json", file, *words], cwd=ROOT, stdout=subprocess.DEVNULL
            )
            for file in files
        ]
        for process in processes:
            assert process.wait() == 0
        return [json.loads(file.read_text())["ranks"][0] for file in files]


def _real(words: list[str], steps: int) -> list[dict[str, Any]]:
    """The same of two ranks that train together."""
    with tempfile.TemporaryDirectory() as folder:
        measured_by_ranks(2, "rehearsal_ranks", folder, str(steps), *words)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]


def _communication(words: list[str], rehearsed: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What the rehearsed ranks send, with the seconds that two ranks take for it."""
    with tempfile.NamedTemporaryFile("w") as file:
        json.dump([rank["communication"] for rank in rehearsed], file)
        file.flush()
        return measured_by_ranks(2, "rehearsal_ranks", file.name, "0", *words)


def _cpu_seconds(rank: dict[str, Any]) -> float:
    return rank["seconds"]["cpu"] + sum(one["times"] * one["seconds"]["cpu"] for one in rank["communication"])
