"""Prints a plan as a table or JSON, and writes a chosen layout as files to start it."""

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron.cli import parse_run
from megatron.cli.provided import Provided
from megatron.common.errors import counted
from megatron.common.formats import duration, prefix_of, with_prefix
from megatron.config import RunConfig
from megatron.model.spec import architecture_of, hardware_flops
from megatron.tools.planning.activations import activations
from megatron.tools.planning.machine import GB, TERA
from megatron.tools.planning.memory import Memory, stage_memory
from megatron.tools.planning.request import Request
from megatron.tools.planning.search import ALIKE, Candidate, Plan
from megatron.tools.planning.timing import spans
from megatron.training.summary import describe_config

WITHIN, MET = 0.15, (68, 68)
"""MET[0] of MET[1] estimates for ``benchmarks/published.csv`` without fitted constants are within this error."""
_DATA_FLAGS = ("data_path", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
SCRIPT, JSON_FILE, HOSTFILE, ACCELERATE_FILE = FILES = "run.sh", "ds_config.json", "hostfile", "accelerate.yaml"


def files(candidate: Candidate) -> dict[str, str]:
    """Files that start the layout: name to text."""
    config = parse_run(candidate.command, candidate.request.environ, candidate.request.architecture).ds_config
    return {
        SCRIPT: script(candidate),
        JSON_FILE: json.dumps(config, indent=2) + "\n",
        HOSTFILE: hostfile(candidate),
        ACCELERATE_FILE: accelerate_config(candidate),
    }


def accelerate_config(candidate: Candidate) -> str:
    """An ``accelerate launch`` config that starts the same processes on the same hosts.

    All other settings come from the DeepSpeed JSON, which ``Accelerator`` reads as well.
    """
    hosts = -(-candidate.request.devices // candidate.request.machine.per_node)
    of_hosts = f"  deepspeed_hostfile: {HOSTFILE}\n  deepspeed_multinode_launcher: pdsh\n" if hosts > 1 else ""
    return f"""\
# LAUNCHER=accelerate ./{SCRIPT}, or in this folder: accelerate launch --config_file {ACCELERATE_FILE} ...
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_config_file: {JSON_FILE}
{of_hosts}  zero3_init_flag: {str(candidate.run.zero.zero_stage == 3).lower()}
num_machines: {hosts}
num_processes: {candidate.request.devices}
machine_rank: 0
main_process_port: 29500
use_cpu: {str(candidate.request.machine.device.accelerator == "cpu").lower()}
"""


def hostfile(candidate: Candidate) -> str:
    """A hostfile with placeholder names and enough hosts for the devices."""
    per_node, devices = candidate.request.machine.per_node, candidate.request.devices
    slots = [min(per_node, devices - first) for first in range(0, devices, per_node)]
    return "".join(f"host{number} slots={count}\n" for number, count in enumerate(slots, 1))


def script(candidate: Candidate) -> str:
    """A shell script that starts the run and passes on its arguments; LAUNCHER selects deepspeed or accelerate.

    With --explain or --dry-run it needs no launcher, hosts, devices or data.
    """
    request, devices = candidate.request, candidate.request.devices
    program, accelerator = request.program, request.machine.device.accelerator
    several = devices > request.machine.per_node
    on_this_host = f"deepspeed --log_level critical --num_gpus {devices}"
    start = f'python tools/launch.py --hostfile "$here/{HOSTFILE}"' if several else on_this_host
    of_hosts = f' --deepspeed_hostfile "$here/{HOSTFILE}"' if several else ""
    data = {name: value for name, value in candidate.given.items() if name in _DATA_FLAGS}
    flags = "".join(
        f" \\\n    {shlex.join(value.arguments)}" for name, value in candidate.given.items() if name not in data
    )
    needed, instead = _needed_data(data, request)
    return f"""\
#!/usr/bin/env bash
# Start it in the folder of {program}. Its arguments go to the program, and the last value of a flag counts.
# With --explain or --dry-run, neither the hosts nor their devices are needed, nor the data set and its tokenizer.
set -euo pipefail
here=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
{"export DS_ACCELERATOR=cpu" if accelerator == "cpu" else ""}
data=({shlex.join(itertools.chain.from_iterable(value.arguments for value in data.values()))})
start=({start})
case "${{LAUNCHER:-deepspeed}}" in
deepspeed) ;;
accelerate)
    start=(accelerate launch --config_file "$here/{ACCELERATE_FILE}"{of_hosts})
    start+=(--deepspeed_config_file "$here/{JSON_FILE}")
    ;;
*) echo "{SCRIPT}: error: LAUNCHER=$LAUNCHER: give deepspeed or accelerate" >&2 && exit 2 ;;
esac
for argument in "$@"; do
    if [[ $argument = --explain || $argument = --dry[-_]run ]]; then
        start=(env DS_ACCELERATOR={accelerator} python)
        set -- --world-size {devices} "$@"
        for file in {shlex.join(needed)}; do
            [ -e "$file" ] && continue
            echo "{SCRIPT}: there is no $file yet: $argument with {instead}" >&2
            data=({instead} --vocab-size {request.vocab_size})
            break
        done
        break
    fi
done
"${{start[@]}}" {program} "${{data[@]}}"{flags} \\
    --deepspeed_config "$here/{JSON_FILE}" "$@"
"""


def _needed_data(data: Mapping[str, Provided], request: Request) -> tuple[list[str], str]:
    """The files of data set and tokenizer that a run needs, and flags with which --explain and --dry-run need none."""
    index = f"{data['data_path'].arguments[-1]}.idx" if "data_path" in data else "."
    tokenizer = [data[name].arguments[-1] for name in ("vocab_file", "tokenizer_model") if name in data]
    unread = f"--data-path {shlex.quote(index[:-4])} --tokenizer-type NullTokenizer"
    return [index, *tokenizer], unread if request.architecture.reads_images else "--mock-data"


def describe_plan(plan: Plan, request: Request, top: int) -> Iterator[str]:
    """The ranked table of layouts, and the reasons against the others, as lines."""
    yield describe_request(request)
    yield (
        f"{counted(plan.looked_at, 'layout')}: {len(plan.fitting):,} fit, {len(plan.superseded):,} more are slower "
        f"than one of the same sizes that takes as little, {len(plan.too_large):,} do not fit, "
        f"{sum(rejection.layouts for rejection in plan.rejections):,} break a rule"
    )
    shown = plan.fitting[:top] or plan.too_large[:1]
    if shown and shown[0].run.model.has_experts:
        yield f"experts: {describe_config(shown[0].run)['experts']}"
    if shown and shown[0].run.model.vision_num_layers:
        yield f"images: {describe_config(shown[0].run)['images']}"
    if plan.fitting:
        yield from ("", *_ranked(shown))
        yield (
            f"times are estimates: {MET[0]} of {MET[1]} published times, to which nothing was fitted, are met within "
            f"{WITHIN:.0%}; layouts within {ALIKE:.0%} of the fastest are listed from the simplest on"
        )
    elif shown:
        yield f"\nnothing fits; the smallest takes {with_prefix(shown[0].memory.total, 'B')}:"
        yield from _ranked(shown)
    yield from ("", *_reasons_against_others(plan, request))


def describe_candidate(candidate: Candidate, memories: Sequence[Memory]) -> Iterator[str]:
    """Memory by stage, time and traffic of one layout, as lines."""
    yield "memory of a rank of each stage"
    yield from stage_table(memories)
    yield f"\nof {duration(candidate.timing.total)} per step: {_shares(candidate)}"
    yield f"a rank sends at most, each step: {_sent(candidate)}"
    yield f"as in the log of the run: {_progress_line(candidate)}"
    if candidate.run.model.vision_num_layers:
        yield _encoder(candidate.run)


def _encoder(run: RunConfig) -> str:
    """The vision encoder's share of FLOPs, and its memory."""
    layers, flops = architecture_of(run.model).layers(run.model), dict[str, int]()
    for layer in layers:
        passes = 3 * layer.flops(run.data.seq_length) - layer.frozen_flops
        flops[layer.part] = flops.get(layer.part, 0) + passes
    kept = activations(run).of_layers
    encoder_bytes = sum(kept[layer.class_name] for layer in layers if layer.part == "vision" and layer.is_block)
    return (
        f"the vision encoder computes {flops['vision'] / sum(flops.values()):.1%} of the FLOPs, and keeps "
        f"{with_prefix(encoder_bytes, 'B')} of activations of a micro-batch, unless they are recomputed"
    )


def describe_request(request: Request) -> str:
    """The request in one line."""
    device = request.machine.device
    per_node, intra, inter = request.machine.per_node, device.intra_bandwidth / GB, device.inter_bandwidth / GB
    return (
        f"{counted(request.devices, 'device')}, {per_node} per host: {with_prefix(device.memory, 'B')} each, of which "
        f"{with_prefix(request.room, 'B')} are used, {device.peak_flops / TERA:g} TFLOP/s in 16-bit, "
        f"{intra:g} GB/s on a host, {inter:g} GB/s between hosts; {request.tokens:.3g} tokens"
    )


_MOST_ROWS = 12


def stage_table(memories: Sequence[Memory]) -> list[str]:
    """Table of memory by purpose, a row for consecutive equal stages; of many rows only the first and last ones."""
    rows, first = [], 0
    for number, memory in enumerate(memories):
        if number + 1 < len(memories) and memories[number + 1] == memory:
            continue
        name = str(number) if first == number else f"{first}-{number}"
        amounts = [with_prefix(amount, "B") for amount in (*memory.parts().values(), memory.total)]
        trained = f", {memory.trained:,} trained" if memory.trained < memory.parameters else ""
        rows.append((name, f"{memory.parameters:,}{trained}", str(memory.working.in_flight), *amounts))
        first = number + 1
    if len(rows) > _MOST_ROWS:
        rows = [*rows[: _MOST_ROWS // 2], ("...", *[""] * (len(rows[0]) - 1)), *rows[-_MOST_ROWS // 2 :]]
    return aligned([("stage", "parameters", "in flight", *memories[0].parts(), "total"), *rows])


def as_json(plan: Plan, request: Request, top: int) -> dict[str, Any]:
    """The plan as a JSON object with all layouts that fit; in bytes, seconds and shares."""
    return {
        "devices": request.devices,
        "room_bytes": request.room,
        "tokens": request.tokens,
        "looked_at": plan.looked_at,
        "fitting": [_as_json(candidate, with_stages=number < top) for number, candidate in enumerate(plan.fitting)],
        "superseded": [_as_json(candidate, with_stages=False) for candidate in plan.superseded],
        "too_large": [_as_json(candidate, with_stages=False) for candidate in plan.too_large],
        "rejections": [asdict(rejection) for rejection in plan.rejections],
    }


def _as_json(candidate: Candidate, *, with_stages: bool) -> dict[str, Any]:
    entry = {
        **layout_of(candidate),
        "memory_bytes": {**candidate.memory.parts(), "total": candidate.memory.total},
        "bubble": candidate.bubble,
        "sent_bytes": asdict(candidate.traffic),
        "links": _links(candidate),
        "seconds": {**candidate.timing.shares, "total": candidate.timing.total},
        "flops_per_device": candidate.flops_per_device,
        "mfu": candidate.mfu,
        "days": candidate.days,
        "arguments": candidate.command,
    }
    if with_stages:
        stages = stage_memory(candidate.run)
        entry["stages"] = [
            {"parameters": stage.parameters, "trained": stage.trained, **stage.parts(), "total": stage.total}
            for stage in stages
        ]
    return entry


def layout_of(candidate: Candidate) -> dict[str, Any]:
    """The settings of a layout by name."""
    run, parallel = candidate.run, candidate.run.parallel
    return {
        "tensor_parallel": parallel.model_parallel_size,
        "pipeline_parallel": parallel.pipe_parallel_size,
        "context_parallel": parallel.sequence_ranks,
        "expert_parallel": parallel.expert_model_parallel_size,
        "data_parallel": parallel.data_parallel_size,
        "zero_stage": run.zero.zero_stage,
        "sequence_parallel": parallel.sequence_parallel,
        "recompute": run.activation.recompute_granularity
        or ("activation" if run.model.recompute_mlp_activation else None),
        "micro_batch_size": run.train.micro_batch_size,
        "gradient_accumulation_steps": run.train.gradient_accumulation_steps,
        "pipeline_schedule": parallel.pipeline_schedule if parallel.pipe_stages > 1 else None,
        "model_chunks_per_stage": parallel.chunks_per_stage,
    }


def _ranked(shown: Sequence[Candidate]) -> list[str]:
    """The table of the ``shown`` layouts; column heads have units that fit the values."""
    memory, memory_prefix = prefix_of(max(candidate.memory.total for candidate in shown))
    sent, sent_prefix = prefix_of(min(max(candidate.traffic.total for candidate in shown), GB))
    speed, speed_prefix = prefix_of(min(max(candidate.flops_per_device for candidate in shown), TERA))
    step, seconds = (1.0, "s") if max(candidate.timing.total for candidate in shown) >= 1 else (1e-3, "ms")
    rows = []
    for number, candidate in enumerate(shown, 1):
        t, p, c, e, d, zero, cut, recompute, micro, gas, schedule, chunks = layout_of(candidate).values()
        rows.append({
            "": number, "TP": t, "PP": p or 1, "CP": c, "EP": e, "DP": d, "ZeRO": zero, "SP": "yes" if cut else "no",
            "recompute": recompute or "none", "micro": micro, "gas": gas,
            "schedule": f"{schedule}{chunks if schedule == 'interleaved' else ''}" if schedule else "-",
            f"memory {memory_prefix}B": f"{candidate.memory.total / memory:.1f}", "bubble": f"{candidate.bubble:.1%}",
            f"sent {sent_prefix}B": f"{candidate.traffic.total / sent:.3g}",
            f"step {seconds}": f"{candidate.timing.total / step:.3g}",
            f"{speed_prefix}FLOP/s": f"{candidate.flops_per_device / speed:.3g}", "MFU": f"{candidate.mfu:.1%}",
            "days": f"{candidate.days:.3g}",
        })  # fmt: skip
    used = [name for name in rows[0] if name not in ("CP", "EP") or any(row[name] > 1 for row in rows)]
    return aligned([used, *([str(row[name]) for name in used] for row in rows)])


def _progress_line(candidate: Candidate) -> str:
    """The estimates in the form of the run's progress line."""
    train, seconds = candidate.run.train, candidate.timing.total
    tokens = train.global_batch_size * candidate.run.data.seq_length / seconds
    speed = hardware_flops(candidate.run) / seconds / candidate.request.devices
    parts = [f"step {duration(seconds)}", f"{tokens:,.0f} tokens/s", with_prefix(speed, "FLOP/s")]
    return " | ".join([*parts, f"memory {with_prefix(candidate.memory.total, 'B')}"])


def _shares(candidate: Candidate) -> str:
    total = candidate.timing.total
    return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in candidate.timing.shares.items())


def _sent(candidate: Candidate) -> str:
    links = _links(candidate)
    return ", ".join(
        f"{name} {with_prefix(amount, 'B')} ({links[name]})"
        for name, amount in asdict(candidate.traffic).items()
        if amount or name not in ("experts", "sequence")
    )


def _links(candidate: Candidate) -> dict[str, str]:
    """Kind of traffic to the link that it uses: the network if a group spans several hosts."""
    per_node, ranks = candidate.request.machine.per_node, spans(candidate.run.parallel)
    return {name: "on a host" if span <= per_node else "between hosts" for name, span in ranks.items()}


def _reasons_against_others(plan: Plan, request: Request) -> Iterator[str]:
    """Why the other layouts are not in the table."""
    if plan.too_large:
        nearest = plan.too_large[0]
        yield (
            f"{len(plan.too_large):6,}  take more than {with_prefix(request.room, 'B')}; the smallest of them "
            f"{with_prefix(nearest.memory.total - request.room, 'B')} more"
        )
    for rejection in plan.rejections:
        yield f"{rejection.layouts:6,}  {rejection.reason}; such as: {rejection.example}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
