"""The stages of the check in order of worth: which commands each runs, what it reads from their results. No torch."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.correctness import against_cpu, kernels, layouts, races
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import Failed, Plan, Stage, gpus, measured, named, run
from benchmarks.gpu.speed import COMPILED, FP8, PAIRS, SHAPES, compared, fitting, profiled
from megatron.common.errors import LaunchError, ResourceError
from megatron.tools.planning.machine import DEVICES, device_of_name
from megatron.tools.reporting.files import read_metrics

GROUPS = ("links", "speed", "scaling", "rehearsal", "profile", "correctness", "run")
_MESSAGES = ("1", "16", "256")
"""MiB."""
_70B, _8B = "--model-preset llama3.1-70b", "--model-preset llama3.1-8b"
_TENSOR = "--model-parallel-size 8 --sequence-parallel"
_LONG = "--seq-length 8192 --batch-size 1 --lr 1e-4"
_GPT2 = {size: f"{' '.join(SHAPES[size].words)} --vocab-size 50304" for size in SHAPES}
REHEARSALS = {
    "345M, DP 8": (8, 1, _GPT2["345M"]),
    "1.3B, DP 8": (8, 1, _GPT2["1.3B"]),
    "Llama 8B, TP 8, sequence parallel": (8, 1, f"{_8B} {_LONG} --gas 4 {_TENSOR}"),
    "Llama 8B, PP 8": (8, 1, f"{_8B} {_LONG} --gas 16 --pipe-parallel-size 8"),
    "Llama 70B, TP 8 x PP 8": (64, 9, f"{_70B} {_LONG} --gas 16 {_TENSOR} --pipe-parallel-size 8"),
}
"""Processes of a run, the rank of it that is rehearsed, and flags."""
_SMALL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 2048 --batch-size 1 --lr 1e-4"
)
Work = Callable[[], dict[str, Any]]


def stages(plan: Plan, machine: Machine) -> Iterator[Stage]:
    """All that ``plan`` asks for on ``machine``."""
    every = (*_figures(plan, machine), *_checks(plan, machine), *_more_figures(plan, machine))
    return (Stage(group, name, work) for group, name, work in every if group in plan.groups)


def _figures(plan: Plan, machine: Machine) -> Iterator[tuple[str, str, Work]]:
    count = len(machine.devices)
    yield "links", f"bandwidth of links, {gpus(count)}", partial(_links, plan, count)
    for pair, size in product(PAIRS[:2], plan.sizes):
        yield "speed", f"{size}: {' and '.join(pair)}", partial(compared, plan, size, pair, machine)
    if count > 1:
        yield "scaling", f"speed of 1 to {gpus(count)}", partial(scaling, plan, machine)
    for name in REHEARSALS:
        yield "rehearsal", f"one rank of {name}", partial(_rehearsed, plan, name, machine)
    for way, size in (*product((COMPILED,), reversed(plan.sizes)), (FP8, plan.sizes[-1]), ("suite", plan.sizes[-1])):
        yield "profile", f"profile of a step, {size}: {way}", partial(profiled, plan, size, way, machine)


def _checks(plan: Plan, machine: Machine) -> Iterator[tuple[str, str, Work]]:
    halves = ["bf16"] if machine.bf16 else []
    dtypes = [machine.dtype] if plan.quick else ["fp32", *halves, "fp16"]
    yield "correctness", "kernels against plain torch", partial(kernels, plan)
    yield "correctness", "races", partial(races, plan, machine)
    yield "correctness", "GPU against CPU", partial(against_cpu, plan, dtypes, machine.processors)
    for devices, dtype in product(dict.fromkeys((1, len(machine.devices))), dtypes):
        yield "correctness", f"layouts on {gpus(devices)}, {dtype}", partial(layouts, plan, devices, dtype)


def _more_figures(plan: Plan, machine: Machine) -> Iterator[tuple[str, str, Work]]:
    yield "run", "a training run and its plan", partial(traced_run, plan, machine)
    for pair, size in product(PAIRS[2 : 3 if plan.quick else None], plan.sizes):
        yield "speed", f"{size}: {' and '.join(pair)}", partial(compared, plan, size, pair, machine)


def _links(plan: Plan, count: int) -> dict[str, Any]:
    return measured(plan, "links", "gpu_links_ranks", *_MESSAGES[: 1 if plan.quick else None], ranks=count)


def _rehearsed(plan: Plan, name: str, machine: Machine) -> dict[str, Any]:
    """What ``tools/rehearse.py`` reports."""
    world, rank, flags = REHEARSALS[name]
    if "tiny" in plan.sizes:
        flags = f"{_SMALL} {flags[flags.index('--gas') :] if '--gas' in flags else ''}"
    title = named("rehearsal", name)
    found = plan.folder / "logs" / f"{title}.json"
    found.unlink(missing_ok=True)
    device = device_of_name(machine.devices[0].name)
    known = [key for key, value in DEVICES.items() if value == device]
    place = ["--world-size", str(world), "--rank", str(rank), "--json", str(found), *["--device", *known] * bool(known)]
    fixed = ["--mock-data", "--train-iters", "100", f"--{machine.dtype}", "--zero-stage", "1"]
    try:
        run(plan, title, ["tools/rehearse.py", *place, *flags.split(), *fixed, *["--compile"] * machine.compiles])
    except LaunchError as error:
        if found.exists():  # it does not fit
            raise Failed(error.messages[0], {"rehearsal": json.loads(found.read_text())}) from None
        raise
    return {"rehearsal": json.loads(found.read_text())}


def scaled_layouts(count: int, machine: Machine) -> Iterator[tuple[str, int, int, str]]:
    """Name, processes, data-parallel ranks and flags of the runs whose speed is compared on so many GPUs."""
    fast = "--compile " * machine.compiles
    fp8 = f"{fast} --fp8-format hybrid" if machine.fp8 and machine.compiles else None
    yield gpus(1), 1, 1, fast
    yield f"DP {count}", count, count, fast
    yield f"DP {count}, no overlap", count, count, f"{fast} --no-overlap-grad-reduce --no-overlap-param-gather"
    if fp8:
        yield f"DP {count}, FP8", count, count, fp8
    yield f"DP {count}, ZeRO 2", count, count, f"{fast} --zero-stage 2"
    yield f"DP {count}, ZeRO 3", count, count, "--zero-stage 3"
    for size in (number for number in (8, 4, 2) if number <= count):
        tensor = f"--model-parallel-size {size} --sequence-parallel"
        yield f"TP {size}, sequence parallel", size, 1, f"{fast} {tensor}"
        yield f"TP {size}, sequence parallel, --tp-comm-overlap", size, 1, f"{tensor} --tp-comm-overlap"
        if fp8:
            yield f"TP {size}, sequence parallel, FP8", size, 1, f"{fp8} {tensor}"
        yield f"PP {size}", size, 1, f"{fast} --pipe-parallel-size {size}"
        yield f"CP {size}", size, 1, f"--context-parallel-size {size}"
    if count >= 4:
        tensor = "--model-parallel-size 2 --sequence-parallel"
        yield "TP 2 x PP 2", 4, 1, f"{fast} {tensor} --pipe-parallel-size 2"


def scaling(plan: Plan, machine: Machine) -> dict[str, Any]:
    """Tokens a second of one GPU, and of several by each kind of parallelism, with the same micro-batch."""
    size = largest(plan, machine)
    shape = replace(size, batch=max(1, size.batch // 2))  # room for the buffers of communication
    rows, failures = [], []
    for name, processes, data, flags in scaled_layouts(len(machine.devices), machine):
        micro_batches = 4 * processes // data  # as many as a pipeline needs
        words = ["--global-batch-size", str(shape.batch * data * micro_batches), *flags.split()]
        metrics = plan.folder / "logs" / f"{named('scaling', name)}.jsonl"
        try:
            train(plan, shape, machine.dtype, processes, metrics, 10, *words)
        except (LaunchError, ResourceError) as error:
            failures.append(f"{name}: {error.messages[0]}")
            continue
        speed = _median(metrics)
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
    train(plan, shape, machine.dtype, 1, metrics, 1, *traced)
    return {"run": folder.name, "shape": str(shape), "tokens_per_second": _median(metrics)}


def largest(plan: Plan, machine: Machine) -> Any:
    """The last of the sizes that fits. Raises ResourceError if none does."""
    for size in reversed(plan.sizes):
        try:
            return fitting(SHAPES[size], machine.free)
        except ResourceError as error:
            last = error
    raise last


def train(plan: Plan, shape: Any, dtype: str, processes: int, metrics: Path, interval: int, *words: str) -> None:
    """``pretrain_gpt2.py`` on synthetic data. Raises LaunchError if it fails.

    ``interval`` is the number of iterations to a line of the log, for which the host waits for the GPU.
    """
    metrics.unlink(missing_ok=True)
    zero = [] if "--zero-stage" in words else ["--zero-stage", "1"]
    fixed = f"--{dtype} --mock-data --vocab-size {shape.vocabulary} --log-interval {interval} --eval-iters 0".split()
    settings = [*shape.words, *zero, *fixed, "--train-iters", str(max(20, 3 * interval))]
    name = "run" if interval == 1 else metrics.stem
    run(plan, name, ["pretrain_gpt2.py", *settings, "--metrics-file", str(metrics), *words], processes)


def _median(metrics: Path) -> float:
    """Tokens a second, without the first quarter of the log."""
    values = [record["tokens_per_second"] for _, record in read_metrics(metrics) if "tokens_per_second" in record]
    return median(values[-(-len(values) // 4) :] or values)
