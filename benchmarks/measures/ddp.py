"""Two ranks compared with torch's DistributedDataParallel: same model, same processes, same global batch.

DDP accumulates gradients over its micro-batches, reduces them in the last one, clips, and steps with fused AdamW. This
project trains data parallel at each ZeRO stage, and as a pipeline of two stages by each schedule. The same rounds time
DeepSpeed without this project around it, torch's FSDP2 sharding as much as ZeRO 2 or 3 and reducing as often, and the
limit: a step without communication plus the collectives of as many bytes by themselves, or plus the bubble that the
schedule has if all parts of a pass take equally long; and DeepSpeed over the same collectives. The collectives through
shared memory are compared with gloo's.
"""

from typing import NamedTuple

from benchmarks.comparing import Comparison, Result, Times
from benchmarks.measures.peers import Shape
from benchmarks.measures.ranks import measured_by_ranks
from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, idle_share

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
    chunks: int = 0
    """Model chunks of a stage; 0 if there are no stages."""

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage idles."""
        name = "1f1b" if SCHEDULE not in self.flags else self.flags[self.flags.index(SCHEDULE) + 1]
        return idle_share(Schedule(name, RANKS, MICRO_BATCHES, self.chunks), PassSeconds())


PIPELINE, SCHEDULE = ("--pipe-parallel-size", str(RANKS)), "--pipeline-schedule"
INTERLEAVED = (SCHEDULE, "interleaved", "--num-virtual-stages-per-pipeline-rank", "2")
WAYS = {
    "ZeRO 0": Way(("--zero-stage", "0"), 1.0),
    "ZeRO 1": Way(("--zero-stage", "1"), 0.98, gathers=1),
    "ZeRO 2": Way(("--zero-stage", "2"), 0.85, OF_A_RANK, 1),
    "ZeRO 2, reduced once": Way(("--zero-stage", "2", *ONCE), 0.85, gathers=1),
    "ZeRO 3": Way(("--zero-stage", "3"), 0.75, OF_A_RANK, 2 * OF_A_RANK),
    "ZeRO 3, reduced once": Way(("--zero-stage", "3", *ONCE), 0.75, gathers=2 * OF_A_RANK),
    "PP 2": Way(PIPELINE, 1.0, chunks=1),
    "PP 2, interleaved": Way((*PIPELINE, *INTERLEAVED), 1.0, chunks=2),
    "PP 2, zbh1": Way((*PIPELINE, SCHEDULE, "zbh1"), 1.0, chunks=1),
    "PP 2, zbv": Way((*PIPELINE, SCHEDULE, "zbv"), 1.0, chunks=2),
}
TOGETHER = (
    ("ZeRO 0",), ("ZeRO 1",), ("ZeRO 2", "ZeRO 2, reduced once"), ("ZeRO 3", "ZeRO 3, reduced once"),
    ("PP 2", "PP 2, interleaved", "PP 2, zbh1", "PP 2, zbv"),
)  # fmt: skip
"""Those that take turns with each other and with the same DDP."""
PEERS = {"DDP": "torch's DDP", "bare DeepSpeed": "bare DeepSpeed", "FSDP2": "torch's FSDP2"}
SAME_COLLECTIVES = "bare DeepSpeed, same collectives"


def measure(rounds: int) -> list[Result]:
    """All implementations; with a barrier before and after each, so that the slower rank's time counts."""
    found = measured_by_ranks(RANKS, "ddp_ranks", str(rounds), OMP_NUM_THREADS="1")
    collectives = {kind: Times(**each) for kind, each in found.pop("collectives").items()}
    results: list[Result] = [_collective(kind, collectives) for kind in ("all-reduce", "reduce-scatter", "all-gather")]
    for name, seconds in found.items():
        results += _of_way(name, WAYS[name], {kind: Times(**each) for kind, each in seconds.items()})
    return results


def _of_way(name: str, way: Way, times: dict[str, Times]) -> list[Result]:
    what, work, ours = f"{name}: {SHAPE}", SHAPE.tokens * MICRO_BATCHES, times["suite"]
    goals = {"DDP": way.goal, "bare DeepSpeed": 0.98, "FSDP2": 1.0}
    rows = [
        Comparison(what, PEERS[peer], ours, times[peer], work, "tokens", goal)
        for peer, goal in goals.items()
        if peer in times
    ]
    if SAME_COLLECTIVES in times:
        theirs = times[SAME_COLLECTIVES]
        rows.append(Comparison(what, SAME_COLLECTIVES, ours, theirs, work, "tokens", is_limit=True))
    return [*rows, *(_bubbles(name, way, times) if way.chunks else [_communication(name, way, times)])]


def _collective(kind: str, times: dict[str, Times]) -> Comparison:
    """Of all gradients or weights, through shared memory beside gloo's."""
    size = 4 * SHAPE.parameters
    what = f"{kind} of {size / 1e6:.0f} MB through shared memory"
    return Comparison(what, "gloo's", times[kind], times[f"gloo's {kind}"], size, "B", 1.0)


def _bubbles(name: str, way: Way, times: dict[str, Times]) -> list[Comparison]:
    """A step beside one without communication, plus the pipeline's bubble, in which a rank waits.

    Without communication are half of the batch on each rank, which is goal and limit, and the stages by themselves, of
    which the slower one counts: there is a layer more to the last stage, the output projection.
    """
    bubble, work = way.bubble, SHAPE.tokens * MICRO_BATCHES
    alone, stages = (
        Times([wall / (1 - bubble) for wall in times[kind].wall], times[kind].cpu)
        for kind in ("no communication", "stages")
    )
    what = f"{name}: the same; {bubble:.1%} of a step are the bubble"
    return [
        Comparison(
            what, "no communication, and the bubble", times["suite"], alone, work, "tokens", 0.95, is_limit=True
        ),
        Comparison(what, "its stages alone, and the bubble", times["suite"], stages, work, "tokens", is_limit=True),
    ]


def _communication(name: str, way: Way, times: dict[str, Times]) -> Comparison:
    """A step beside one without communication plus its collectives by themselves."""
    reduction = "all-reduce" if way.gathers == 0 else "reduce-scatter"
    alone, reduced, gathered = (times[kind] for kind in ("no communication", reduction, "all-gather"))
    wall, cpu = (
        [a + way.reductions * r + way.gathers * g for a, r, g in zip(*clocks, strict=True)]
        for clocks in ((alone.wall, reduced.wall, gathered.wall), (alone.cpu, reduced.cpu, gathered.cpu))
    )
    gathers = f" and {way.gathers} x all-gather" if way.gathers else ""
    size, share = f"{4 * SHAPE.parameters / 1e6:.0f} MB", 1 - sum(alone.wall) / sum(wall)
    what = f"{name}: {way.reductions} x {reduction}{gathers} of {size} are {share:.0%} of the prediction"
    work, peer = SHAPE.tokens * MICRO_BATCHES, "no communication, and the collectives"
    return Comparison(what, peer, times["suite"], Times(wall, cpu), work, "tokens", 0.9, is_limit=True)
