"""Pictures of a layout: the memory of its stages as PNG, the schedule of its pipeline as SVG or as text."""

from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from megatron.parallel.pipeline.schedule import Schedule
from megatron.parallel.pipeline.simulation import PassSeconds, idle_share, simulate
from megatron.tools.planning.machine import GB
from megatron.tools.planning.memory import Memory
from megatron.tools.reporting.pictures import box, text

_MOST_LINES = 16
_KINDS = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
_MOST_BARS = 64


def schedule_text(schedule: Schedule, width: int = 116) -> Iterator[str]:
    """The start of a schedule, a line for each stage, as far as ``width`` columns show it.

    A cell is a forward pass, I or W; a full backward pass takes two. ``F3b`` is the forward pass of micro-batch 3
    through the second chunk of the stage.
    """
    shown, cells = schedule.shortened, dict[int, dict[int, str]]()
    for stage, action, begin, _ in simulate(shown, PassSeconds()):
        turn = "abcdefghijklmnopqrstuvwxyz"[action.chunk // schedule.stages % 26] if schedule.chunks > 1 else ""
        cells.setdefault(stage, {})[int(begin)] = f"{action.kind}{action.micro_batch + 1}{turn}"
    size = 1 + max(len(text) for row in cells.values() for text in row.values())
    label = len(f"stage {schedule.stages - 1}") + 1
    columns = min((width - label) // size, 1 + max(max(row) for row in cells.values()))
    for stage, row in sorted(cells.items())[:_MOST_LINES]:
        line = "".join(f"{row.get(column, '.' if _is_idle(row, column) else ''):{size}}" for column in range(columns))
        yield f"{f'stage {stage}':{label}}{line.rstrip()}"


_WIDTH, _LEFT, _ROW = 1200, 70, 22


def schedules_as_svg(schedules: Sequence[Schedule], seconds: PassSeconds) -> str:
    """Each of ``schedules`` as a block with a row for each stage, all on one scale of time. SVG text.

    ``seconds`` are the seconds of the passes of a stage; a chunk takes a part of them. Of a schedule with many
    micro-batches the first ones are drawn.
    """
    timed = [simulate(one.shortened, PassSeconds(*(part / one.chunks for part in seconds))) for one in schedules]
    scale = (_WIDTH - _LEFT - 20) / max(one.end for passes in timed for one in passes)
    parts, top = list(_legend(24)), 60.0
    for schedule, passes in zip(schedules, timed, strict=True):
        idle = idle_share(schedule, PassSeconds(*(part / schedule.chunks for part in seconds)))
        parts.append(text(10, top, f"{_title(schedule)}: {idle:.1%} of the time idle", size=15))
        top += 10
        for stage in range(schedule.stages):
            parts.append(text(10, top + stage * _ROW + 14, f"stage {stage}"))
            parts.append(box(_LEFT, top + stage * _ROW, _WIDTH - _LEFT - 20, _ROW - 3, "#f4f4f4"))
        for stage, action, begin, end in passes:
            x, y, width = _LEFT + begin * scale, top + stage * _ROW, (end - begin) * scale
            color = _SHADES[action.kind][action.chunk // schedule.stages % 2]
            parts.append(f"<rect x='{x:.0f}' y='{y:.0f}' width='{width - 1:.0f}' height='{_ROW - 3}' fill='{color}'/>")
            parts.append(f"<text x='{x + width / 2:.0f}' y='{y + 14:.0f}'>{action.micro_batch + 1}</text>")
        top += schedule.stages * _ROW + 28
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {top:g}' width='100%' "
        "font-family='Helvetica, Arial, sans-serif' font-size='10' text-anchor='middle'>\n"
        "<rect width='100%' height='100%' fill='white'/>\n" + "\n".join(parts) + "\n</svg>\n"
    )


_SHADES = {
    "F": ("#8db8e2", "#cfe1f3"), "B": ("#86c79c", "#cbe7d3"), "I": ("#86c79c", "#cbe7d3"), "W": ("#e9c46a", "#f6e6bd"),
}  # fmt: skip
"""Colors of each kind of pass, of the first and of later chunks of a stage."""


def _title(schedule: Schedule) -> str:
    chunks = f", {schedule.chunks} model chunks per stage" if schedule.chunks > 1 else ""
    return f"{schedule.name}{chunks}"


def _legend(y: float) -> Iterator[str]:
    for number, (kind, words) in enumerate(_KINDS.items()):
        yield box(10 + 290 * number, y - 12, 14, 14, _SHADES[kind][0])
        yield text(30 + 290 * number, y, f"{kind}: {words}")


def _is_idle(row: Mapping[int, str], column: int) -> bool:
    """Whether a cell without a pass is not the second one of a backward pass."""
    return not row.get(column - 1, "").startswith("B")


def draw_memory(memories: Sequence[Memory], room: float, file: IO[bytes]) -> None:
    """A bar of each stage's memory by purpose, and a line for the available memory; PNG into ``file``."""
    from matplotlib.figure import Figure

    step = -(-len(memories) // _MOST_BARS)
    shown = list(enumerate(memories))[::step]
    figure = Figure(figsize=(max(5.0, 0.22 * len(shown) + 3), 4), layout="constrained")
    axes = figure.subplots()
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
