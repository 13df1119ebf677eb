"""The stages of the check: which commands each runs, and what it reads from their results. No torch here."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.correctness import against_cpu, kernels, layouts
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import SECONDS, Failed, Plan, Stage, gpus, run
from benchmarks.measures.gpu_step import PAIRS, SHAPES, compared, fitting
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.tables import rows_of
from megatron.common.errors import LaunchError, ResourceError
from megatron.tools.reporting.files import read_metrics

GROUPS = ("correctness", "speed", "scaling", "run", "profile")
_TRAINED, _SKIPPED = 20, 5
"""Iterations of runs whose speed is measured, and how many of them do not count."""


def stages(plan: Plan, machine: Machine) -> Iterator[Stage]:
    """All that ``plan`` asks for on ``machine``."""
    halves = ["bf16"] if machine.bf16 else []
    dtypes = [machine.dtype] if plan.quick else ["fp32", *halves, "fp16"]
    count = len(machine.devices)
    if "correctness" in plan.groups:
        yield Stage("correctness", "kernels against plain torch", kernels)
        yield Stage("correctness", "GPU against CPU", lambda: against_cpu(plan, dtypes, machine.processors))
        for devices in dict.fromkeys((1, count)):
            for dtype in dtypes:
                yield Stage("correctness", f"layouts on {gpus(devices)}, {dtype}", layouts(plan, devices, dtype))
    if "speed" in plan.groups:
        for size, pair in product(plan.sizes, PAIRS[:2] if plan.quick else PAIRS):
            yield Stage("speed", f"{size}: {' and '.join(pair)}", _speed(plan, machine, size, pair))
    if "scaling" in plan.groups and count > 1:
        yield Stage("scaling", f"speed of 1 to {gpus(count)}", lambda: scaling(plan, machine))
    if "run" in plan.groups:
        yield Stage("run", "a training run and its plan", lambda: traced_run(plan, machine))
    if "profile" in plan.groups:
        yield Stage("profile", "torch's profile of a step", lambda: profiled(plan, machine))


def _speed(plan: Plan, machine: Machine, size: str, pair: tuple[str, str]) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        try:
            return {"rows": rows_of(compared(size, pair, plan.rounds, machine))}
        except LaunchError as error:
            name = re.sub("[^a-z0-9]+", "-", f"speed-{size}-{pair[0]}-{pair[1]}".lower())
            (plan.folder / "logs" / f"{name}.txt").write_text(error.messages[0])
            raise

    return work


def scaling(plan: Plan, machine: Machine) -> dict[str, Any]:
    """Tokens a second of one GPU, and of several by each kind of parallelism, with the same micro-batch."""
    count, size = len(machine.devices), largest(plan, machine)
    shape = replace(size, batch=max(1, size.batch // 2))  # room for the buffers of communication
    layouts = {
        f"{gpus(1)}": (1, 1, ""),
        f"DP {count}, ZeRO 1": (count, count, ""),
        f"DP {count}, ZeRO 3": (count, count, "--zero-stage 3"),
        "TP 2, sequence parallel": (2, 1, "--model-parallel-size 2 --sequence-parallel"),
        "PP 2": (2, 1, "--pipe-parallel-size 2"),
    }
    if count >= 4:
        layouts["TP 2 x PP 2"] = (4, 1, "--model-parallel-size 2 --pipe-parallel-size 2 --sequence-parallel")
    rows, failures = [], []
    for number, (name, (processes, data, flags)) in enumerate(layouts.items()):
        words = ["--global-batch-size", str(shape.batch * data * 4), *flags.split()]
        metrics = plan.folder / "logs" / f"scaling-{number}.jsonl"
        try:
            train(plan, shape, machine.dtype, processes, metrics, *words)
        except LaunchError as error:
            failures.append(f"{name}: {error.messages[0]}")
            continue
        speed = _median(metrics, "tokens_per_second")
        rows.append({"layout": name, "devices": processes, "tokens_per_second": speed})
    found = {"scaling": rows, "shape": str(shape)}
    if failures:
        raise Failed("; ".join(failures), found)
    return found


def traced_run(plan: Plan, machine: Machine) -> dict[str, Any]:
    """A run of the largest model with a trace, whose folder the report reads; and its plan."""
    folder, shape = plan.folder / "run", largest(plan, machine)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    traced = ["--run-dir", str(folder), "--trace", str(folder), "--global-batch-size", str(4 * shape.batch)]
    train(plan, shape, machine.dtype, 1, metrics, *traced)
    return {"run": folder.name, "shape": str(shape), "tokens_per_second": _median(metrics, "tokens_per_second")}


def profiled(plan: Plan, machine: Machine) -> dict[str, Any]:
    """Torch's profile of a step of the largest model."""
    shape, trace = largest(plan, machine), plan.folder / "profile.json.gz"
    request = {"shape": asdict(shape), "dtype": machine.dtype, "trace": str(trace)}
    found = measured_by_ranks(1, "gpu_profile_ranks", json.dumps(request), time_limit=SECONDS)
    return {"profile": found, "shape": str(shape), "trace": trace.name}


def largest(plan: Plan, machine: Machine) -> Any:
    """The last of the sizes that fits. Raises ResourceError if none does."""
    for size in reversed(plan.sizes):
        try:
            return fitting(SHAPES[size], machine.free)
        except ResourceError as error:
            last = error
    raise last


def train(plan: Plan, shape: Any, dtype: str, processes: int, metrics: Path, *words: str) -> None:
    """``pretrain_gpt2.py`` on synthetic data. Raises LaunchError if it fails."""
    metrics.unlink(missing_ok=True)
    zero = [] if "--zero-stage" in words else ["--zero-stage", "1"]
    fixed = f"--{dtype} --mock-data --vocab-size {shape.vocabulary} --log-interval 1 --eval-iters 0".split()
    settings = [*shape.words, *zero, *fixed, "--train-iters", str(_TRAINED), "--metrics-file", str(metrics)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    launcher = launcher if processes > 1 else []
    run(plan, metrics.stem if metrics.parent != plan.folder / "run" else "run",
        [*launcher, "pretrain_gpt2.py", *settings, *words])  # fmt: skip


def _median(metrics: Path, key: str) -> float:
    values = [record[key] for _, record in read_metrics(metrics) if key in record]
    return median(values[_SKIPPED:] or values)
