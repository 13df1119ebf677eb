"""Two processes of one thread each compared with one process of two threads: same model, same global batch.

Data parallel 2, tensor parallel 2, and two pipeline stages. The slowest rank's time counts. Tensor parallelism is
also compared with a prediction: the time of the one process, which has the same cores, plus the time of the
all-reduces of its layers, measured by the same ranks. These go through shared memory, and are compared with gloo's and
with DeepSpeed's for inference.
"""

from statistics import median

from benchmarks.comparing import Comparison, Result, Times
from benchmarks.measures.peers import Shape
from benchmarks.measures.ranks import measured_by_ranks

SHAPE = Shape(layers=4, hidden=384, heads=6, sequence=256, batch=1, vocabulary=512)
MICRO_BATCHES = 8
ONE = "one process, two threads"
WAYS = {
    ONE: (1, ()),
    "DP 2": (2, ()),
    "TP 2": (2, ("--model-parallel-size", "2")),
    "PP 2": (2, ("--pipe-parallel-size", "2")),
}
GOALS = {"DP 2": 0.98, "TP 2": 0.9, "PP 2": 0.95 * MICRO_BATCHES / (MICRO_BATCHES + 1)}
OURS = "shared memory"
ALL_REDUCES_OF: dict[str, float | None] = {"gloo": 2.0, "DeepSpeed's": None}
ALL_REDUCES = 4 * SHAPE.layers * MICRO_BATCHES
"""Of a step: two a layer forward, two backward, each of hidden states (arXiv 2104.04473, section 3.2)."""
MOST_ROUNDS = 3
"""Every round starts four runs."""


def measure(rounds: int) -> list[Result]:
    """Every way in turn, in at most ``MOST_ROUNDS``; each runs in processes of its own, a few steps a round."""
    rounds = min(rounds, MOST_ROUNDS)
    times = {name: Times([], []) for name in WAYS}
    sums = {name: Times([], []) for name in (OURS, *ALL_REDUCES_OF)}
    for number in range(rounds):
        names = list(WAYS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            ranks, flags = WAYS[name]
            found = measured_by_ranks(ranks, "steps", *flags, OMP_NUM_THREADS="2" if ranks == 1 else "1")
            times[name].wall.append(found["wall"])
            times[name].cpu.append(found["cpu"])
            for kind, seconds in found["all_reduces"].items():
                sums[kind].wall.append(min(seconds["wall"]))
                sums[kind].cpu.append(min(seconds["cpu"]))
    one = times.pop(ONE)
    work = SHAPE.tokens * MICRO_BATCHES
    compared: list[Result] = [
        Comparison(f"{name}: {SHAPE}", ONE, ours, one, work, "tokens", GOALS[name]) for name, ours in times.items()
    ]
    return [*compared, *_all_reduces(sums), _modelled(times["TP 2"], one, sums[OURS])]


def _all_reduces(sums: dict[str, Times]) -> list[Result]:
    size = 4 * SHAPE.tokens * SHAPE.hidden
    what = f"all-reduce of {size / 1e3:,.0f} kB between two ranks, through shared memory"
    return [Comparison(what, peer, sums[OURS], sums[peer], size, "B", goal) for peer, goal in ALL_REDUCES_OF.items()]


def _modelled(measured: Times, one: Times, all_reduce: Times) -> Comparison:
    wall, cpu = (
        [c + ALL_REDUCES * r for c, r in zip(*clocks, strict=True)]
        for clocks in ((one.wall, all_reduce.wall), (one.cpu, all_reduce.cpu))
    )
    share = median(ALL_REDUCES * r / p for r, p in zip(all_reduce.wall, wall, strict=True))
    size, each = 4 * SHAPE.tokens * SHAPE.hidden, median(all_reduce.wall)
    what = (
        f"TP 2: {ALL_REDUCES} all-reduces of {size / 1e3:,.0f} kB, each {each * 1e6:,.0f} us by itself"
        f" ({size / each / 1e9:.2g} GB/s), are {share:.0%} of the prediction"
    )
    work, peer = SHAPE.tokens * MICRO_BATCHES, "one process and the all-reduces"
    return Comparison(what, peer, measured, Times(wall, cpu), work, "tokens", 0.9, is_limit=True)
