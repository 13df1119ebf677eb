"""A planned layout as files to start it with: a script, DeepSpeed's JSON and a hostfile."""

import json
import shlex
from collections.abc import Sequence
from typing import IO

from megatron.config.command_line import parse_run
from megatron.parallel.pipeline.schedule import bubble, timed_passes
from megatron.tools.planning.memory import Memory
from megatron.tools.planning.presets import GB
from megatron.tools.planning.search import Candidate

SCRIPT, JSON_FILE, HOSTFILE = "run.sh", "ds_config.json", "hostfile"


def files(one: Candidate) -> dict[str, str]:
    """Name and text of each file."""
    config = parse_run(one.command, one.request.environ, one.request.architecture).ds_config
    return {SCRIPT: script(one), JSON_FILE: json.dumps(config, indent=2) + "\n", HOSTFILE: hostfile(one)}


def hostfile(one: Candidate) -> str:
    """As many hosts as the devices fill, by names to be replaced."""
    per_node, devices = one.request.machine.per_node, one.request.devices
    slots = [min(per_node, devices - first) for first in range(0, devices, per_node)]
    return "".join(f"host{number} slots={count}\n" for number, count in enumerate(slots, 1))


def script(one: Candidate) -> str:
    """A shell script that starts it, and hands on what it is given."""
    program = one.request.program
    lines = [
        "#!/usr/bin/env bash",
        f"# Start it in the folder of {program}. Its arguments go to the program, such as --explain.",
        "set -euo pipefail",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
    ]
    if one.request.machine.device.accelerator == "cpu":
        lines.append("export DS_ACCELERATOR=cpu")
    several = one.request.devices > one.request.machine.per_node
    hosts = f'--hostfile "$here/{HOSTFILE}"' if several else f"--num_gpus {one.request.devices}"
    said = [f"    {line} \\" for line in _flags(one.command)]
    lines += [f"deepspeed {hosts} {program} \\", *said, f'    --deepspeed_config "$here/{JSON_FILE}" "$@"']
    return "\n".join(lines) + "\n"


def _flags(words: list[str]) -> list[str]:
    """Each flag with its value, quoted for a shell."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [shlex.join(flag) for flag in found]


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
    title = f"{p} stages, {m} micro-batches{some}: {bubble(p, m):.1%} of the time idle"
    axes.invert_yaxis()
    axes.set(xlabel="time, in forward passes of a micro-batch", ylabel="stage", title=title)
    if p <= 32:
        axes.set_yticks(range(p))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(file, format="png")
    pyplot.close(figure)
