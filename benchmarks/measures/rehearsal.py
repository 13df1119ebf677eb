"""A rehearsed rank beside the real one: the step of two ranks, their CPU time, and the peak of memory.

Both ranks are rehearsed at the same time, since two real ones share caches and memory, too. Communication is measured:
two ranks replay an iteration, compute before each operation as long as the rehearsed ones did on average, and do it
with each other. So a step has the waits for a rank that comes later. By CPU time, these do not count, so that a busy
machine disturbs it less. Experts are padded to their capacity: a rehearsed router sends all experts as many tokens,
which a real one that has learned nothing does not.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape

SHAPE = Shape(layers=4, hidden=256, heads=4, sequence=256, batch=4, vocabulary=2048)
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
MICRO_BATCHES = 2
STEPS = 6
"""Timed iterations of a round."""


def measure(rounds: int) -> list[Quantity]:
    """Every layout, rehearsed and trained in turn."""
    results = []
    for name, flags in LAYOUTS.items():
        words = [*SHAPE.words, *flags, *f"--gas {MICRO_BATCHES} --vocab-size {SHAPE.vocabulary}".split()]
        words += "--mock-data --train-iters 1000 --num-workers 0".split()
        found: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                rehearsed, replayed = (_by_ranks(what, folder, words) for what in ("rehearsed", "replayed"))
                real = _by_ranks("trained", folder, words)
            for what, values in (
                ("step with measured communication", (_slowest(real), _slowest(replayed))),
                ("CPU time of a step of both ranks", (_cpu_seconds(real), _cpu_seconds(replayed))),
                ("peak of live tensors", (_peak(real), _peak(rehearsed))),
            ):
                for values_of, value in zip(found[what], values, strict=True):
                    values_of.append(value)
        for what, both in found.items():
            unit = "B" if "tensors" in what else "s"
            results.append(Quantity(f"{name}: {SHAPE}", f"rehearsed {what}", *both, unit))
    return results


def _by_ranks(what: str, folder: str, words: list[str]) -> list[dict[str, Any]]:
    """What both ranks leave in ``folder``."""
    measured_by_ranks(2, "rehearsal_ranks", what, folder, str(STEPS), *words, DS_ACCELERATOR="cpu")
    return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(2)]


def _slowest(ranks: Iterable[dict[str, Any]]) -> float:
    return max(rank["seconds"]["wall"] for rank in ranks)


def _cpu_seconds(ranks: Iterable[dict[str, Any]]) -> float:
    return sum(rank["seconds"]["cpu"] for rank in ranks)


def _peak(ranks: Iterable[dict[str, Any]]) -> float:
    return max(float(rank["memory_bytes"]["peak"]) for rank in ranks)
