"""Pictures of a plan: memory of each stage's rank, and the order of a pipeline's passes."""

from collections.abc import Sequence
from typing import IO

from megatron.pipe_schedule import timed_passes
from megatron.planner.formulas import bubble_share
from megatron.planner.memory import Memory
from megatron.planner.presets import GB

_MOST_BARS = 64
_MOST_PASSES = 1200
"""Stages x micro-batches that one can tell apart in a picture."""


def draw_memory(memories: Sequence[Memory], room: float, file: IO[bytes]) -> None:
    """A bar for each stage, of what its memory is for, and a line where the room ends; PNG into ``file``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    step = -(-len(memories) // _MOST_BARS)
    shown = list(enumerate(memories))[::step]
    figure, axes = pyplot.subplots(figsize=(max(5.0, 0.22 * len(shown) + 3), 4), layout="constrained")
    names = [str(number) for number, _ in shown]
    bottom = [0.0] * len(shown)
    for part in memories[0].parts():
        amounts = [memory.parts()[part] / GB for _, memory in shown]
        axes.bar(names, amounts, bottom=bottom, label=part, width=0.8)
        bottom = [low + amount for low, amount in zip(bottom, amounts, strict=True)]
    axes.axhline(room / GB, color="black", linestyle="--", linewidth=1, label="room")
    axes.set(xlabel="pipeline stage", ylabel="GB of a rank", title="Memory at its peak")
    axes.tick_params(axis="x", labelsize=8 if len(shown) <= 32 else 6)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(file, format="png")
    pyplot.close(figure)


def draw_schedule(p: int, m: int, file: IO[bytes], backward: float = 2.0) -> None:
    """A row for each stage with its passes in time, and the share of it that is idle; PNG into ``file``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = min(m, max(_MOST_PASSES // p, p))
    drawn_passes = timed_passes(p, drawn, 1.0, backward)
    length = max(one.end for one in drawn_passes)
    figure, axes = pyplot.subplots(figsize=(max(6.0, min(length * 0.28, 24)), 0.3 * p + 1.4), layout="constrained")
    for is_forward, colour in ((True, "tab:blue"), (False, "tab:green")):
        own = [one for one in drawn_passes if one.is_forward is is_forward]
        axes.barh(
            [one.stage for one in own],
            [one.end - one.begin for one in own],
            left=[one.begin for one in own],
            color=colour,
            edgecolor="white",
            linewidth=0.4,
            label="forward" if is_forward else "backward",
        )
    if length <= 100 and p <= 16:
        for one in drawn_passes:
            axes.text((one.begin + one.end) / 2, one.stage, str(one.micro_batch), ha="center", va="center", fontsize=6)
    some = f", {drawn} of them drawn" if drawn < m else ""
    title = f"{p} stages, {m} micro-batches{some}: {bubble_share(p, m):.1%} of the time idle"
    axes.invert_yaxis()
    axes.set(xlabel="time, in forward passes of a micro-batch", ylabel="stage", title=title)
    if p <= 32:
        axes.set_yticks(range(p))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(file, format="png")
    pyplot.close(figure)
