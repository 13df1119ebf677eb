"""Memory of each rank beside what the planner says: live tensors, and resident memory of the process.

Weights, gradients and optimizer are counted between two micro-batches; what a step adds to them at its peak is mostly
activations; resident memory is the process's growth from before the engine to the peak of a step, when libraries have
been loaded by a tiny model on the same layout. One start of a layout gives a figure for each of its ranks.
"""

from benchmarks.comparing import Quantity
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.measures.shapes import Shape
from benchmarks.resident import RETURNED_AT_ONCE

SHAPE = Shape(layers=4, hidden=256, heads=4, sequence=128, batch=4, vocabulary=8192)
TINY = Shape(layers=2, hidden=32, heads=4, sequence=32, batch=1, vocabulary=64)
BUCKET = ("--zero-reduce-bucket-size", "1000000")
LAYOUTS = {
    "one process": (1, ()),
    "one process, full recomputation": (1, ("--checkpoint-activations",)),
    "one process, bf16, ZeRO 1": (1, ("--bf16", "--zero-stage", "1", *BUCKET)),
    "DP 2, ZeRO 1": (2, ("--zero-stage", "1", *BUCKET)),
    "DP 2, ZeRO 2": (2, ("--zero-stage", "2", *BUCKET)),
    "DP 2, ZeRO 3": (2, ("--zero-stage", "3", *BUCKET)),
    "TP 2": (2, ("--model-parallel-size", "2")),
    "PP 2": (2, ("--pipe-parallel-size", "2")),
}
STATES = ("weights", "gradients", "optimizer")


def measure(rounds: int) -> list[Quantity]:
    """Every layout once: nothing in it is a matter of chance but resident memory."""
    results = []
    for name, (ranks, flags) in LAYOUTS.items():
        found = measured_by_ranks(ranks, "memory_ranks", *flags, OMP_NUM_THREADS="1", **RETURNED_AT_ONCE)
        planned, measured = ([of_rank[kind] for of_rank in found] for kind in ("planned", "measured"))
        whole = [of_rank["total"] for of_rank in planned], [of_rank["resident"] for of_rank in found]
        kinds = {
            "planned training state": (list(map(_states, planned)), list(map(_states, measured))),
            "planned activations and buffers": (list(map(_rest, planned)), list(map(_rest, measured))),
            "planned total, resident memory": whole,
        }
        results += [Quantity(f"{name}: {SHAPE}", kind, ours, theirs, "B") for kind, (theirs, ours) in kinds.items()]
    return results


def _states(memory: dict[str, int]) -> int:
    return sum(memory[kind] for kind in STATES)


def _rest(memory: dict[str, int]) -> int:
    return memory["total"] - _states(memory)
