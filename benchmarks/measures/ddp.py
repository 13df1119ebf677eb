"""Two ranks compared with torch's DistributedDataParallel: same model, same processes, same global batch.

DDP accumulates gradients over its micro-batches, reduces them in the last one, clips, and steps with fused AdamW. This
project trains data parallel at each ZeRO stage, and as a pipeline of two stages. The same rounds time DeepSpeed without
this project around it, torch's FSDP2 sharding as much as ZeRO 2 or 3 and reducing as often, and the limit: a step
without communication plus the collectives of as many bytes by themselves.
The collectives through shared memory are compared with gloo's.
"""

from typing import NamedTuple

from benchmarks.comparing import Comparison, Quantity, Result, Times
from benchmarks.measures.peers import Shape
from benchmarks.measures.ranks import measured_by_ranks

SHAPE = Shape(layers=4, hidden=384, heads=6, sequence=256, batch=1, vocabulary=512)
MICRO_BATCHES = 8
"""Of a step, of both ranks together."""
RANKS = 2
OF_A_RANK = MICRO_BATCHES // RANKS
ONCE = ("--zero-coalesce-grad-reduction",)


class Way(NamedTuple):
    """How this project trains, and what it is held to."""

    flags: tuple[str, ...]
    goal: float
    """The least share of DDP's speed that is good enough."""
    reductions: int = 1
    """Of all gradients in a step: reduce-scatters, but all-reduces at ZeRO 0."""
    gathers: int = 0
    """Of all weights in a step."""


WAYS = {
    "ZeRO 0": Way(("--zero-stage", "0"), 1.0),
    "ZeRO 1": Way(("--zero-stage", "1"), 0.98, gathers=1),
    "ZeRO 2": Way(("--zero-stage", "2"), 0.85, OF_A_RANK, 1),
    "ZeRO 2, reduced once": Way(("--zero-stage", "2", *ONCE), 0.85, gathers=1),
    "ZeRO 3": Way(("--zero-stage", "3"), 0.75, OF_A_RANK, 2 * OF_A_RANK),
    "ZeRO 3, reduced once": Way(("--zero-stage", "3", *ONCE), 0.75, gathers=2 * OF_A_RANK),
    "PP 2": Way(("--pipe-parallel-size", "2"), 1.0),
}
PEERS = {"DDP": "torch's DDP", "bare DeepSpeed": "bare DeepSpeed", "FSDP2": "torch's FSDP2"}
AT_THE_LIMIT = 1 / 0.9


def measure(rounds: int) -> list[Result]:
    """All implementations; with a barrier before and after each, so that the slower rank's time counts."""
    found = measured_by_ranks(RANKS, "ddp_ranks", str(rounds), OMP_NUM_THREADS="1")
    collectives = {kind: Times(**each) for kind, each in found.pop("collectives").items()}
    results: list[Result] = [_collective(kind, collectives) for kind in ("all-reduce", "reduce-scatter", "all-gather")]
    for name, seconds in found.items():
        times = {kind: Times(**each) for kind, each in seconds.items()}
        ours = times["suite"]
        goals = {"DDP": WAYS[name].goal, "bare DeepSpeed": 0.98, "FSDP2": 1.0}
        work = SHAPE.tokens * MICRO_BATCHES
        results += [
            Comparison(f"{name}: {SHAPE}", PEERS[peer], ours, times[peer], work, "tokens", goal)
            for peer, goal in goals.items()
            if peer in times
        ]
        results.append(_at_the_limit(name, WAYS[name], ours.wall, times))
    return results


def _collective(kind: str, times: dict[str, Times]) -> Comparison:
    """Of all gradients or weights, through shared memory beside gloo's."""
    size = 4 * SHAPE.parameters
    what = f"{kind} of {size / 1e6:.0f} MB through shared memory"
    return Comparison(what, "gloo's", times[kind], times[f"gloo's {kind}"], size, "B", 1.0)


def _at_the_limit(name: str, way: Way, measured: list[float], limits: dict[str, Times]) -> Quantity:
    """A step beside one without communication plus its collectives by themselves, or plus the pipeline's bubble."""
    if name.startswith("PP"):
        ideal = [alone * (MICRO_BATCHES + RANKS - 1) / MICRO_BATCHES for alone in limits["no communication"].wall]
        return Quantity(f"{name}, a step", "no communication, and the bubble", measured, ideal, "s", most=1 / 0.95)
    reduction = "all-reduce" if way.gathers == 0 else "reduce-scatter"
    rounds = zip(*(limits[kind].wall for kind in ("no communication", reduction, "all-gather")), strict=True)
    predicted = [alone + way.reductions * reduced + way.gathers * gathered for alone, reduced, gathered in rounds]
    share = 1 - sum(limits["no communication"].wall) / sum(predicted)
    gathers = f" and {way.gathers} x all-gather" if way.gathers else ""
    size = f"{4 * SHAPE.parameters / 1e6:.0f} MB"
    what = f"{name}, a step: {way.reductions} x {reduction}{gathers} of {size} are {share:.0%} of the prediction"
    return Quantity(what, "no communication, and the collectives", measured, predicted, "s", most=AT_THE_LIMIT)
