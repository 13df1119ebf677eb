"""A planned layout as files to start it with: a script, DeepSpeed's JSON and a hostfile."""

import json
import shlex

from megatron.arguments import parse_run
from megatron.planner.search import Candidate

SCRIPT, JSON_FILE, HOSTFILE = "run.sh", "ds_config.json", "hostfile"


def files(one: Candidate) -> dict[str, str]:
    """Name and text of each file."""
    config = parse_run(one.command, one.request.environ).ds_config
    return {SCRIPT: script(one), JSON_FILE: json.dumps(config, indent=2) + "\n", HOSTFILE: hostfile(one)}


def hostfile(one: Candidate) -> str:
    """As many hosts as the devices fill, by names to be replaced."""
    per_node, devices = one.request.machine.per_node, one.request.devices
    slots = [min(per_node, devices - first) for first in range(0, devices, per_node)]
    return "".join(f"host{number} slots={count}\n" for number, count in enumerate(slots, 1))


def script(one: Candidate) -> str:
    """A shell script that starts it, and hands on what it is given."""
    lines = [
        "#!/usr/bin/env bash",
        "# Start it in the folder of pretrain_gpt2.py. What it is given goes to the program, such as --explain.",
        "set -euo pipefail",
        'here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)',
    ]
    if one.request.machine.device.accelerator == "cpu":
        lines.append("export DS_ACCELERATOR=cpu")
    several = one.request.devices > one.request.machine.per_node
    hosts = f'--hostfile "$here/{HOSTFILE}"' if several else f"--num_gpus {one.request.devices}"
    said = [f"    {line} \\" for line in _flags(one.command)]
    lines += [f"deepspeed {hosts} pretrain_gpt2.py \\", *said, f'    --deepspeed_config "$here/{JSON_FILE}" "$@"']
    return "\n".join(lines) + "\n"


def _flags(words: list[str]) -> list[str]:
    """Each flag with its value, quoted for a shell."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            found.append([])
        found[-1].append(word)
    return [shlex.join(flag) for flag in found]
