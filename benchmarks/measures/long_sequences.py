"""Memory and time of a step against the length of its sequence, on one rank and with context parallelism.

Memory is the peak of live tensors on the rank with the highest, beside the planner's. Time is CPU time of a step of the
rank with the most. Both are fitted by a power law over the three longest sequences: in a window they grow with the
tokens, and without one time does with the attended tokens. The model is so small that attention is much of the work.
``write_figures.py`` draws the curves.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.comparing import TOLERANCE, Growth, Quantity, fitted
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of a sample."""
LONGEST_WITHOUT_WINDOW = 8192
"""More would take most of the time."""
CONTEXT_PARALLEL = (1, 2, 4)
MOST_ROUNDS = 3
WINDOW = ("--window-size", "255,0")
ALL_TOKENS = "all tokens"
KINDS: dict[str, tuple[str, ...]] = {
    ALL_TOKENS: (),
    "window of 255": WINDOW,
    "window, tiled MLP": (*WINDOW, "--tiled-mlp"),
    "window, tiled MLP, recomputed": (*WINDOW, "--tiled-mlp", "--checkpoint-activations"),
}
WITH_RANKS = "window, tiled MLP"
"""The kind that is measured with more ranks than one, too."""
MEMORY, TIME = "memory, bytes", "CPU time of a step, s"


def shape_of(tokens: int) -> Shape:
    """The model, for sequences of so many tokens."""
    return Shape(layers=2, hidden=64, heads=2, sequence=tokens, batch=1, vocabulary=256)


def measure(rounds: int) -> list[Quantity]:
    """Each kind on one rank, and one of them on more, in at most MOST_ROUNDS rounds."""
    results: list[Quantity] = []
    for kind, flags in KINDS.items():
        lengths = [tokens for tokens in LENGTHS if kind != ALL_TOKENS or tokens <= LONGEST_WITHOUT_WINDOW]
        for ranks in CONTEXT_PARALLEL if kind == WITH_RANKS else (1,):
            words = [*flags, *(("--context-parallel-size", str(ranks)) if ranks > 1 else ())]
            task = json.dumps([lengths, min(rounds, MOST_ROUNDS)])
            found = measured_by_ranks(ranks, "long_sequences_ranks", task, *words, OMP_NUM_THREADS="1")
            results += _results(f"{kind}, {ranks} ranks" if ranks > 1 else kind, lengths, found)
    return results


def _results(kind: str, lengths: Sequence[int], found: Sequence[Mapping]) -> list[Quantity]:
    """Memory of each length beside the planner's, and how memory and time grow."""
    bounds = {"least": 1 - TOLERANCE, "most": 1 + TOLERANCE}
    measured, planned = ([one[name] for one in found] for name in ("measured", "planned"))
    memory = [
        Quantity(f"{kind}: memory, {tokens:,} tokens", "planner", [ours], [theirs], "B", **bounds)
        for tokens, ours, theirs in zip(lengths, measured, planned, strict=True)
    ]
    growth = fitted(lengths, [measured], lengths, "tokens", MEMORY)
    points = list(zip(map(float, lengths), measured, planned, strict=True))
    by_round = list(zip(*(one["seconds"] for one in found), strict=True))
    theory = [shape_of(tokens).flops for tokens in lengths] if kind == ALL_TOKENS else lengths
    curves = [replace(growth, points=points), fitted(lengths, by_round, theory, "tokens", TIME)]
    return [*memory, *(_named(kind, curve) for curve in curves)]


def _named(kind: str, curve: Growth) -> Growth:
    """``curve`` with what it is of. Memory may grow less than in proportion: weights do not grow."""
    return replace(curve, what=f"{kind}: {curve.what}", least=None)
