"""The pictures of the documentation, drawn from the code that they explain: each function returns an SVG."""

import html
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config import ParallelConfig
from megatron.parallel import groups
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.planning.memory import Memory, stage_memory
from megatron.tools.planning.request import make_request
from megatron.tools.planning.search import search
from megatron.tools.reporting.files import read_record, read_series, read_timeline
from megatron.tools.reporting.page import KEYS, page
from megatron.tools.reporting.pictures import CURVE_KEYS, as_svg, draw_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
EXPLAINED = """--explain --world-size 8 --model-parallel-size 2 --pipe-parallel-size 4 --num-layers 24
--hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16 --batch-size 2 --gas 8 --train-iters 1000
--lr 1.5e-4 --mock-data --attention-dropout 0 --hidden-dropout 0"""
REPORT_HEIGHT = 2420
COLORS = ("#5b9bd5", "#6ab187", "#d6a520", "#c8553d", "#8f6bb3", "#8a8a8a")


def rank_cube() -> str:
    """Eight ranks at TP 2 x PP 2 x DP 2 as a cube, and the groups along each axis."""
    parallel = ParallelConfig(model_parallel_size=2, pipe_parallel_size=2, world_size=8)
    figure, (cube, *panels) = _panels(12, 3.4, 4)
    at = {rank: (rank % 2 + 0.6 * (rank // 2 % 2), -(rank // 4) - 0.45 * (rank // 2 % 2)) for rank in range(8)}
    kinds = {"tensor": (COLORS[0], "same samples, parts of each layer"),
             "data": (COLORS[1], "same weights, other samples"),
             "pipe": (COLORS[3], "same samples, other layers")}  # fmt: skip
    found = groups(parallel)
    for axes, name in zip(panels, kinds, strict=True):
        color, meaning = kinds[name]
        for members in found[name]:
            for target in (cube, axes):
                target.plot(*zip(*(at[rank] for rank in members), strict=True), color=color, linewidth=4, zorder=1)
        axes.set_title(f"{name} groups: {meaning}", fontsize=9)
    cube.set_title("TP 2 x PP 2 x DP 2", fontsize=10)
    for axes in (cube, *panels):
        for rank, (x, y) in at.items():
            _label(axes, x, y, str(rank), "#f4f4f4")
        axes.set(xlim=(-0.4, 2.0), ylim=(-1.9, 0.4))
    return as_svg(figure)


def splits() -> str:
    """The column split of the first matrix of an MLP and the row split of the second one, over two ranks."""
    figure, (axes,) = _panels(11, 3.2, 1)
    for place, (title, parts, tall) in enumerate((
        ("X\n[s, h]\non both ranks", [(0, 0, 1, 2)], 0),
        ("A, column-parallel\n[h, 4h / 2] each", [(0, 0, 1.5, 1), (1.5, 0, 1.5, 1)], 1),
        ("GELU(X A)\nno communication", [(0, 0, 1.5, 2), (1.5, 0, 1.5, 2)], 1),
        ("B, row-parallel\n[4h / 2, h] each", [(0, 1.5, 1, 1.5), (0, 0, 1, 1.5)], 1),
        ("partial sums Y0, Y1", [(0, 0, 1, 2), (1.3, 0, 1, 2)], 1),
        ("all-reduce: Y\non both ranks", [(0, 0, 1, 2)], 0),
    )):  # fmt: skip
        left = 4 * place
        for number, (x, y, width, height) in enumerate(parts):
            color = COLORS[number] if tall else COLORS[5]
            axes.add_patch(_rectangle(left + x, y, width, height, color))
            if tall:
                axes.text(left + x + width / 2, y + height / 2, f"rank {number}", ha="center", va="center", fontsize=7)
        axes.text(left + 1, -0.25, title, ha="center", va="top", fontsize=8)
        if place:
            axes.text(left - 0.6, 1, "→" if place != 5 else "+", ha="center", va="center", fontsize=14)
    axes.set(xlim=(-0.5, 23), ylim=(-1.2, 3.2))
    return as_svg(figure)


def zero_bars() -> str:
    """Bytes of a rank at each ZeRO stage: GPT 1.3B in bf16 on eight devices, one sample per micro-batch."""
    return _bars({f"ZeRO {stage}": _memories("1.3b", 8, 64, zero_stage=stage)[0] for stage in (1, 2, 3)},
                 "GPT 1.3B, bf16, DP 8, a micro-batch of one sample: a rank's memory, planned")  # fmt: skip


def stage_bars() -> str:
    """Bytes of a rank of each stage of a pipeline: earlier stages keep activations of more micro-batches."""
    memories = _memories("13b", 8, 64, model_parallel_size=2, pipe_parallel_size=4, zero_stage=1)
    return _bars({f"stage {stage}": memory for stage, memory in enumerate(memories)},
                 "GPT 13B, bf16, TP 2 x PP 4 with 1F1B: memory of each stage, planned")  # fmt: skip


def ring() -> str:
    """Which chunks of a sequence four context-parallel ranks have, and where they pass keys and values to."""
    ranks = 4
    figure, (axes, around) = _panels(10, 2.8, 2)
    for rank in range(ranks):
        for chunk in (rank, 2 * ranks - 1 - rank):
            axes.add_patch(_rectangle(chunk, 0, 0.95, 1, COLORS[rank]))
            axes.text(chunk + 0.47, 0.5, f"rank {rank}", ha="center", va="center", fontsize=8)
    axes.set(xlim=(-0.2, 8.2), ylim=(-0.8, 1.8))
    axes.set_title("the eight chunks of a sequence: each rank has an early and a late one", fontsize=9)
    at = [(0, 1), (1, 1), (1, 0), (0, 0)]
    arrow = {"arrowstyle": "->", "shrinkA": 34, "shrinkB": 34}
    for rank, (x, y) in enumerate(at):
        around.annotate("", at[(rank + 1) % ranks], (x, y), arrowprops=arrow)
        _label(around, x, y, f"rank {rank}\nown queries", COLORS[rank])
    around.set(xlim=(-0.5, 1.5), ylim=(-0.5, 1.5))
    around.set_title("keys and values go around, three times", fontsize=9)
    return as_svg(figure)


def experts() -> str:
    """Tokens of two ranks, sent to the experts that the router chooses and back."""
    figure, (axes,) = _panels(9, 3.2, 1)
    for token, chosen in enumerate([(0, 1), (2, 0), (1, 3), (3, 2)]):
        y, color = 3 - token, COLORS[token // 2]
        for expert in chosen:
            axes.plot((0.5, 2.5), (y, 3 - expert), color=color, linewidth=1.5)
            axes.plot((3.5, 5.5), (3 - expert, y), color=color, linewidth=1.5)
        _label(axes, 0, y, f"token {token}, rank {token // 2}", color)
        _label(axes, 3, y, f"expert {token}, rank {token // 2}", color)
        axes.text(6, y, "weighted sum", ha="center", va="center", fontsize=8)
    for x in (1.5, 4.5):
        axes.text(x, 3.5, "all-to-all", ha="center", fontsize=9)
    axes.set(xlim=(-0.8, 6.8), ylim=(-0.5, 3.9))
    return as_svg(figure)


def learning_rate_curves(curves: Mapping[str, Sequence[float]]) -> str:
    """A line for each of ``curves``, the learning rates of iterations 0, 1, ...; each pair has a color."""
    figure, (axes,) = _panels(8, 3.5, 1, is_bare=False)
    for number, (name, rates) in enumerate(curves.items()):
        axes.plot(rates, color=f"C{number // 2}", linestyle=("-", "--")[number % 2], label=name)
    axes.set(xlabel="iteration", ylabel="learning rate")
    axes.set_ylim(bottom=0)
    axes.legend()
    return as_svg(figure)


def quickstart_loss() -> str:
    """The curves of a run of examples/quickstart.sh, whose metrics are kept beside the picture."""
    series = read_series(IMAGES / "quickstart.jsonl", CURVE_KEYS)
    return as_svg(draw_curves({"quickstart": series}, {"unigram entropy": 6.2707}, ""))


def explained() -> str:
    """What ``--explain`` prints about a pipeline, up to DeepSpeed's configuration; passes are colored."""
    words = [sys.executable, "pretrain_gpt2.py", *shlex.split(EXPLAINED)]
    environ = {**os.environ, "DS_ACCELERATOR": "cuda"}
    shown = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.partition("> deepspeed")[0].splitlines() if line.startswith(">")]
    colors = {"F": COLORS[0], "B": COLORS[1]}

    def cell(match: re.Match) -> str:
        return f'<tspan fill="{colors[match[1]]}" font-weight="bold">{match[0]}</tspan>'

    texts = (re.sub(r"\b([FB])\d+", cell, html.escape(line)) for line in lines)
    rows = (f'<text x="14" y="{24 + 17 * number}" xml:space="preserve">{text}</text>\n'
            for number, text in enumerate(texts))  # fmt: skip
    width, height = 28 + 7.9 * max(map(len, lines)), 20 + 17 * len(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-size="13"'
        f' font-family="DejaVu Sans Mono, monospace">\n<rect width="100%" height="100%" fill="#f6f6f6"/>\n'
        f"{''.join(rows)}</svg>\n"
    )


def report() -> str:
    """The page of tools/report.py about a run of two stages, whose files are kept beside the picture, as far as the
    environment of the run.
    """
    run = IMAGES / "report"
    series = read_series(run / "metrics.jsonl", KEYS)
    text = page("runs/my", series, read_record(run / "run.json"), read_timeline(run))
    style = text[text.index("<style>") : text.index("</head>")].replace("body {", "#page {")
    body = text[text.index("<body>") + len("<body>") : text.index("<h2>Environment")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1280 {REPORT_HEIGHT}">{style}'
        '<rect width="100%" height="100%" fill="white"/><foreignObject width="1280" height="100%">'
        f'<div xmlns="http://www.w3.org/1999/xhtml" id="page">{body}</div></foreignObject></svg>\n'
    )


PICTURES: dict[str, Callable[[], str]] = {
    "rank-cube": rank_cube, "splits": splits, "zero": zero_bars, "stages": stage_bars, "ring": ring, "experts": experts,
    "quickstart-loss": quickstart_loss, "explain": explained, "report": report,
}  # fmt: skip


def _memories(model: str, devices: int, batch: int, **layout: int) -> list[Memory]:
    """The memory of each stage at a layout; what is not given is 1."""
    fixed = {"model_parallel_size": 1, "pipe_parallel_size": 0, "batch_size": 1, **layout}
    recompute = [] if fixed["pipe_parallel_size"] else ["--recompute-granularity", "full"]
    words = [word for name, value in fixed.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags = ["--global-batch-size", str(batch), *recompute, *words]
    request = make_request(flags, Machine(DEVICES["h100"], 8), devices, model=model)
    return stage_memory(search(request).fitting[0].run)


def _bars(rows: dict[str, Memory], title: str) -> str:
    figure, (axes,) = _panels(9, 0.45 * len(rows) + 1.3, 1, is_bare=False)
    for y, (_, memory) in enumerate(rows.items()):
        left = 0.0
        for (name, amount), color in zip(memory.parts().items(), COLORS, strict=True):
            axes.barh(y, amount / 1e9, left=left, color=color, label=name if y == 0 else None)
            left += amount / 1e9
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="GB", title=title)
    figure.legend(loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return as_svg(figure)


def _panels(width: float, height: float, number: int, *, is_bare: bool = True) -> tuple["Figure", Sequence["Axes"]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = list(figure.subplots(1, number, squeeze=False)[0])
    for axes in all_axes if is_bare else []:
        axes.axis("off")
    return figure, all_axes


def _rectangle(x: float, y: float, width: float, height: float, color: str):  # noqa: ANN202
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=color, edgecolor="white")


def _label(axes: "Axes", x: float, y: float, text: str, color: str) -> None:
    box = {"boxstyle": "round", "facecolor": color, "edgecolor": "#333333"}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, zorder=2, bbox=box)
