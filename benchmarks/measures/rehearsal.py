"""A rehearsed rank beside the real one: the step of two ranks, their CPU time, and the peak of memory.

Both ranks are rehearsed at the same time, since two real ones share caches and memory, too. Communication is measured:
two real ranks repeat each operation that the rehearsed ones issue. By CPU time, what waits for another rank does not
count, so that a busy machine disturbs it less. Experts are padded to their capacity: a rehearsed router sends all
experts as many tokens, which a real one that has learned nothing does not.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
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
    "EP 2": (
        *("--num-experts", "4", "--expert-model-parallel-size", "2"),
        *("--moe-expert-capacity-factor", "1", "--moe-pad-expert-input-to-capacity"),
    ),
}
MICRO_BATCHES = 4
STEPS = 5
"""Timed iterations of a round."""


def measure(rounds: int) -> list[Quantity]:
    """Every layout, rehearsed and trained in turn."""
    from megatron.cli import parse_run
    from megatron.tools.planning.machine import DEVICES, Machine
    from megatron.tools.rehearsal.estimate import Expected
    from megatron.training.preflight import check

    results = []
    for name, flags in LAYOUTS.items():
        words = [*SHAPE.words, *flags, *f"--gas {MICRO_BATCHES} --vocab-size {SHAPE.vocabulary}".split()]
        words += "--mock-data --train-iters 1000 --num-workers 0".split()
        run, _ = check(parse_run(words, {"WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}))
        found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for _ in range(rounds):
            rehearsed, real = _rehearsed(words), _real(words)
            for rank, measured in zip(rehearsed, _communication(words, rehearsed), strict=True):
                rank["communication"] = measured
            expected = Expected(run, Machine(DEVICES["cpu"], 2), rehearsed)
            for what, values in (
                ("step with measured communication", (max(one["seconds"]["wall"] for one in real), expected.seconds)),
                ("CPU time of a step of both ranks", (_cpu_seconds(real), _cpu_seconds(rehearsed))),
                ("peak of live tensors", (_peak(real), _peak(rehearsed))),
            ):
                for values_of, value in zip(found[what], values, strict=True):
                    values_of.append(value)
        for what, both in found.items():
            unit = "B" if "tensors" in what else "s"
            results.append(Quantity(f"{name}: {SHAPE}", f"rehearsed {what}", *both, unit))
    return results


def _rehearsed(words: list[str]) -> list[dict[str, Any]]:
    """Both ranks, as ``tools/rehearse.py`` writes them."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(rank)) for rank in range(2)]
        of_tool = [sys.executable, "tools/rehearse.py", "--world-size", "2", "--steps", str(STEPS), "--device", "cpu"]
        processes = [
            subprocess.Popen(
                [*of_tool, "--rank", file.name, "--json", file, *words], cwd=ROOT, stdout=subprocess.DEVNULL
            )
            for file in files
        ]
        for process in processes:
            assert process.wait() == 0
        return [json.loads(file.read_text())["ranks"][0] for file in files]


def _real(words: list[str]) -> list[dict[str, Any]]:
    """The same of two ranks that train together."""
    with tempfile.TemporaryDirectory() as folder:
        measured_by_ranks(2, "rehearsal_ranks", folder, str(STEPS), *words)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]


def _communication(words: list[str], rehearsed: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What the rehearsed ranks send, with the seconds that two ranks take for it."""
    with tempfile.NamedTemporaryFile("w") as file:
        issued = [rank["communication"] for rank in rehearsed]
        between = rehearsed[0]["seconds"]["wall"] / sum(one["times"] for one in issued[0])
        json.dump([issued, between], file)
        file.flush()
        return measured_by_ranks(2, "rehearsal_ranks", file.name, "0", *words)


def _cpu_seconds(ranks: Iterable[dict[str, Any]]) -> float:
    """Of a step of all ``ranks``, with their communication where it is not part of the step."""
    return sum(
        rank["seconds"]["cpu"]
        + sum(one["times"] * one["seconds"]["cpu"] for one in rank["communication"] if "seconds" in one)
        for rank in ranks
    )


def _peak(ranks: Iterable[dict[str, Any]]) -> float:
    return max(float(rank["memory_bytes"]["peak"]) for rank in ranks)
