"""Stages that compare what a GPU computes: kernels, models and layouts. No torch here."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import product
from typing import Any

from benchmarks.gpu.machine import ROOT, Machine
from benchmarks.gpu.plan import Failed, Plan, measured, named, run
from benchmarks.measures.ranks import kill_all
from megatron.common.errors import LaunchError, ResourceError
from megatron.tools.reporting.files import read_metrics

BOUNDS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Largest relative difference of losses and gradient norms from those of the CPU in fp32."""
_LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-query-groups 2"
FAMILIES = {
    "GPT-2": ("pretrain_gpt2.py", ""),
    "Llama": ("pretrain_gpt2.py", _LLAMA),
    "packed documents": ("pretrain_gpt2.py", "--reset-attention-mask --reset-position-ids --eod-mask-loss"),
    "Llama with windows": ("pretrain_gpt2.py", f"{_LLAMA} --pre-tokens 100"),
    "experts": ("pretrain_gpt2.py", f"{_LLAMA} --num-experts 4 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm"),
    "BERT": ("pretrain_bert.py", ""),
    "T5": ("pretrain_t5.py", "--decoder-seq-length 64"),
    "GPT-2, --compile": ("pretrain_gpt2.py", "--compile"),
    "Llama, --compile": ("pretrain_gpt2.py", f"{_LLAMA} --compile"),
    "layers recomputed": ("pretrain_gpt2.py", "--checkpoint-activations"),
    "Muon": ("pretrain_gpt2.py", "--optimizer muon"),
    "Adafactor": ("pretrain_gpt2.py", "--optimizer adafactor"),
    "LoRA": ("pretrain_gpt2.py", "--lora-rank 4"),
}
"""Models and what else has kernels of its own, each with its program and flags."""
_FP32_ONLY = ("Adafactor",)
ONE_GPU = ("tp1-pp0-dp1", "tp1-pp1-dp1", "tp1-pp0-dp1-zero2", "tp1-pp0-dp1-zero3")
MORE_GPUS = {
    2: (
        "tp2-pp0-dp1-zero1-sp", "tp1-pp2-dp1-zero1", "tp1-pp0-dp2-zero3", "tp2-pp0-dp1", "tp1-pp0-dp2-zero1",
        "tp1-pp0-dp2-zero2", "tp1-pp0-dp1-zero3-ulysses2", "tp1-pp2-dp1-zero1-dualpipev",
    ),
    4: ("tp2-pp2-dp1-zero1", "tp2-pp0-dp2-zero3-sp", "tp1-pp2-dp2-zero1", "tp4-pp0-dp1-zero1-sp"),
    8: ("tp2-pp2-dp2-zero1-sp", "tp2-pp0-dp4-zero3"),
}  # fmt: skip
"""Layouts that are checked with so many GPUs or more."""
RACES = {
    "ZeRO 1": "--zero-stage 1",
    "ZeRO 2": "--zero-stage 2",
    "ZeRO 3": "--zero-stage 3",
    "PP 2": "--zero-stage 1 --pipe-parallel-size 2",
    "TP 2, sequence parallel": "--zero-stage 1 --model-parallel-size 2 --sequence-parallel",
    "CP 2": "--zero-stage 1 --context-parallel-size 2",
}
QUICK = 3
"""Of these, in a quick check."""
_SAME = (
    "--use-cpu-initialization --attention-dropout 0 --hidden-dropout 0 --global-batch-size 4 --log-interval 1"
    " --eval-iters 0"
)


def kernels(plan: Plan) -> dict[str, Any]:
    """Each kernel that only a GPU has against plain torch, and torch's choice among those of attention."""
    found = measured(plan, "kernels", "gpu_kernels_ranks")
    wrong = [f"{row['kernel']} ({row['dtype']})" for row in found["kernels"] if not row["agrees"]]
    wrong += [f"the kernel for {row['what']}" for row in found["choices"] if not row["agrees"]]
    if wrong:
        raise Failed(f"{len(wrong)} differ: {'; '.join(wrong[:3])}", found)
    return found


def races(plan: Plan, machine: Machine) -> dict[str, Any]:
    """Training with everything asynchronous delayed, against the same without delays, bit by bit.

    Two ranks share a GPU if there is only one; their collectives are then copies through host memory.
    """
    ranks, environ, rows = 2, {}, []
    if len(machine.devices) == 1:
        folder = [str(ROOT / "tests/support/emulated_cuda/inject"), os.environ.get("PYTHONPATH")]
        environ = {"ONE_GPU": "1", "PYTHONPATH": os.pathsep.join(filter(None, folder))}
    for name, flags in RACES.items():
        common = [*plan.small_model, *_SAME.split(), f"--{machine.dtype}", "--train-iters", "3"]
        row = {"run": name, "ranks": ranks, "agrees": True}
        try:
            run(plan, named("races", name), ["tests/support/races.py", *common, *flags.split()], ranks, **environ)
        except (LaunchError, ResourceError) as error:
            row |= {"agrees": False, "failure": error.messages[0]}
        rows.append(row)
    if wrong := [row["run"] for row in rows if not row["agrees"]]:
        raise Failed(f"differ or failed: {'; '.join(wrong)}", {"races": rows})
    return {"races": rows}


def against_cpu(plan: Plan, dtypes: Sequence[str], processors: int) -> dict[str, Any]:
    """Losses and gradient norms on the GPU, of each model in each data type, against those of the CPU in fp32.

    Some at a time, where there are processors for them.
    """
    at_once = max(1, min(8, processors // 2))
    names = [*FAMILIES][: QUICK if plan.quick else None]
    with ThreadPoolExecutor(at_once) as pool:
        runs = {
            (name, dtype): pool.submit(_train, plan, name, dtype, max(1, processors // at_once))
            for name, dtype in product(names, ("cpu", *dtypes))
            if name not in _FP32_ONLY or dtype in ("cpu", "fp32")
        }
        try:
            wait(runs.values())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            kill_all()
            raise
    ended = [(key, run) for key, run in runs.items() if key[1] != "cpu" and not _had_no_time(runs[key[0], "cpu"], run)]
    rows = [_compared(*key, runs[key[0], "cpu"], run) for key, run in ended]
    if not rows:
        raise ResourceError(f"no run was finished within --minutes {plan.minutes:g}")
    left_out = sum(key[1] != "cpu" for key in runs) - len(rows)
    found = {"against_cpu": rows, "left_out": left_out}
    if wrong := [f"{row['model']} in {row['dtype']}" for row in rows if not row["agrees"]]:
        raise Failed(f"{', '.join(wrong)}: the GPU differs from the CPU in fp32, or its run failed", found)
    return found


def _had_no_time(*runs: Future) -> bool:
    return any(isinstance(run.exception(), ResourceError) for run in runs)


def _train(plan: Plan, name: str, dtype: str, threads: int) -> list[Mapping[str, Any]]:
    """The metrics of a run of the model ``name``."""
    title = named(dtype, name)
    metrics = plan.folder / "logs" / f"{title}.jsonl"
    metrics.unlink(missing_ok=True)
    program, flags = FAMILIES[name]
    if dtype not in ("cpu", "fp32"):
        flags += f" --{dtype} --zero-stage 1"
        flags += " --initial-loss-scale 4096" * (dtype == "fp16")  # that no iteration is skipped
    iterations = ["--train-iters", str(plan.iterations), "--metrics-file", str(metrics)]
    environ = {"DS_ACCELERATOR": "cpu"} if dtype == "cpu" else {}
    command = [program, *plan.small_model, *_SAME.split(), *iterations, *flags.split()]
    run(plan, f"train-{title}", command, OMP_NUM_THREADS=str(threads), **environ)
    return [record for _, record in read_metrics(metrics) if "lm_loss" in record]


def _compared(name: str, dtype: str, on_cpu: Future, on_gpu: Future) -> dict[str, Any]:
    row = {"model": name, "dtype": dtype, "bound": BOUNDS[dtype]}
    try:
        cpu, gpu = on_cpu.result(), on_gpu.result()
    except (LaunchError, ResourceError) as error:
        return row | {"loss": None, "grad_norm": None, "agrees": False, "failure": error.messages[0]}
    loss, norm = (_largest_difference(cpu, gpu, key) for key in ("lm_loss", "grad_norm"))
    agrees = len(cpu) == len(gpu) and loss <= BOUNDS[dtype] and norm <= 10 * BOUNDS[dtype]
    return row | {"loss": loss, "grad_norm": norm, "agrees": agrees}


def _largest_difference(expected: Sequence[Mapping], found: Sequence[Mapping], key: str) -> float:
    pairs = [(one.get(key), other.get(key)) for one, other in zip(expected, found, strict=False)]
    differences = [abs(b - a) / abs(a) for a, b in pairs if a and b is not None]
    return max(differences, default=float("inf"))


def layouts_of(devices: int, dtype: str, quick: bool) -> list[str]:
    """Names of the layouts that are compared on so many GPUs, the reference first. In half precision ZeRO is on."""
    limit = QUICK if quick else None
    names = [*ONE_GPU[: 1 if devices > 1 else limit]]
    for least, more in MORE_GPUS.items():
        names += more[:limit] if devices >= least else ()
    return names if dtype == "fp32" else [name if "-zero" in name else _with_zero(name) for name in names]


def _with_zero(name: str) -> str:
    tensor, pipe, data, *rest = name.split("-")
    return "-".join([tensor, pipe, data, "zero1", *rest])


def layouts(plan: Plan, devices: int, dtype: str) -> dict[str, Any]:
    """Layouts on so many GPUs in one data type, compared by ``tools/verify_layout.py``."""
    found = plan.folder / "logs" / f"layouts-{devices}-{dtype}.json"
    found.unlink(missing_ok=True)
    chosen = ["--all", str(devices)] if plan.all_layouts else ["--layouts", *layouts_of(devices, dtype, plan.quick)]
    precision = [] if dtype == "fp32" else [f"--{dtype}"]
    command = ["tools/verify_layout.py", *chosen, "--iterations", str(plan.iterations), "--time-limit", "900"]
    command += ["--global-batch-size", "16", "--json", str(found), *plan.small_model, *precision]
    try:
        run(plan, f"layouts-{devices}-{dtype}", command)
    except LaunchError as error:
        if not found.exists():
            raise
        result = json.loads(found.read_text())
        wrong = [layout["layout"] for layout in result["layouts"] if not layout["agrees"]]
        raise Failed(f"{', '.join(wrong)} differ or failed" if wrong else str(error), {"layouts": result}) from None
    return {"layouts": json.loads(found.read_text())}
