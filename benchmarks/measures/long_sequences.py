"""Memory and time of a step against the length of its sequence, on one rank and with context parallelism.

Memory is the peak of live tensors on the rank with the highest, beside the planner's. Time is CPU time of a whole step
on one process, and per token held to that of the shortest sequence: in a window it does not grow, and without one it
does, with the attended tokens. The model is so small that attention is most of the work.
"""

import json
from collections.abc import Mapping, Sequence

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of a sample."""
CONTEXT_PARALLEL = (1, 2, 4)
WINDOW = ("--window-size", "511,0")
KINDS: dict[str, tuple[str, ...]] = {
    "all tokens": (),
    "window of 511": WINDOW,
    "window, tiled MLP": (*WINDOW, "--tiled-mlp"),
    "window, tiled MLP, recomputed": (*WINDOW, "--tiled-mlp", "--checkpoint-activations"),
}
WITH_RANKS = "window, tiled MLP"
"""The kind that is measured with more ranks than one, too."""
TOLERANCE = 0.1


def shape_of(tokens: int) -> Shape:
    """The model, for sequences of so many tokens."""
    return Shape(layers=4, hidden=128, heads=4, sequence=tokens, batch=1, vocabulary=512)


def measure(rounds: int) -> list[Quantity]:
    """Each kind on one rank, and one of them on more."""
    results: list[Quantity] = []
    for kind, flags in KINDS.items():
        for ranks in CONTEXT_PARALLEL if kind == WITH_RANKS else (1,):
            words = [*flags, *(("--context-parallel-size", str(ranks)) if ranks > 1 else ())]
            found = measured_by_ranks(
                ranks, "long_sequences_ranks", json.dumps([LENGTHS, rounds]), *words, OMP_NUM_THREADS="1"
            )
            results += _results(f"{kind}, {ranks} ranks" if ranks > 1 else kind, found, held=bool(flags) and ranks == 1)
    return results


def _results(what: str, found: Sequence[Mapping[str, float]], *, held: bool) -> list[Quantity]:
    """Memory of each length beside the planner's; time per token beside that of the shortest."""
    bounds = {"least": 1 - TOLERANCE, "most": 1 + TOLERANCE}
    memory = [
        Quantity(f"{what}: memory, {tokens:,} tokens", "planner", [one["measured"]], [one["planned"]], "B", **bounds)
        for tokens, one in zip(LENGTHS, found, strict=True)
    ]
    each = [one["seconds"] / tokens * 1e6 for tokens, one in zip(LENGTHS, found, strict=True)]
    time = [
        Quantity(
            f"{what}: time per token, {tokens:,} tokens",
            f"{LENGTHS[0]:,} tokens",
            [micro],
            [each[0]],
            "microseconds",
            most=1 + TOLERANCE if held else None,
        )
        for tokens, micro in zip(LENGTHS[1:], each[1:], strict=True)
    ]
    return [*memory, *time]
