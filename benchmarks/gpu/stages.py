"""The stages of the check: which commands each runs, and what it reads from their results. No torch here."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.comparing import Result
from benchmarks.gpu.machine import Machine
from benchmarks.measures.gpu_step import PAIRS, SHAPES, compared, fitting
from benchmarks.measures.ranks import measured_by_ranks
from benchmarks.tables import rows_of
from megatron.config.errors import LaunchError, ResourceError, UserError
from megatron.launch.processes import die_with_parent
from megatron.tools.reporting.files import read_metrics

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("correctness", "speed", "scaling", "run", "profile")
SECONDS = 3600
"""A command that takes longer is ended."""
BOUNDS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 2e-3}
"""Largest relative difference of losses and gradient norms from those of the CPU in fp32."""
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
QUICK = 3
"""Of these, in a quick check."""
_SMALL = (
    "--num-layers 4 --hidden-size {hidden} --num-attention-heads 8 --seq-length {sequence} --batch-size 2"
    " --max-position-embeddings {sequence} --mock-data --vocab-size {vocabulary} --num-workers 0 --lr 1e-3"
)
_SIZES = {"tiny": (64, 32, 128)}
_USUAL = (256, 256, 1024)
"""Hidden size, tokens of a sample and vocabulary of the model whose layouts are compared."""
_TRAINED, _SKIPPED = 20, 5
"""Iterations of runs whose speed is measured, and how many of them do not count."""


class Plan(NamedTuple):
    """What is asked for."""

    sizes: Sequence[str]
    groups: Sequence[str]
    rounds: int
    quick: bool
    all_layouts: bool
    folder: Path

    @property
    def small_model(self) -> list[str]:
        """Flags of the model whose layouts are compared."""
        hidden, sequence, vocabulary = _SIZES.get(self.sizes[0], _USUAL)
        return _SMALL.format(hidden=hidden, sequence=sequence, vocabulary=vocabulary).split()

    @property
    def iterations(self) -> int:
        """Of the runs that are compared."""
        return 3 if self.quick else 5


@dataclass(frozen=True)
class Stage:
    """A part of the check that may fail by itself."""

    group: str
    name: str
    work: Callable[[], dict[str, Any]]
    """Returns its result. Raises a UserError if it fails; whatever is not possible here is in ``left_out`` of it."""


def stages(plan: Plan, machine: Machine) -> Iterator[Stage]:
    """All that ``plan`` asks for on ``machine``."""
    halves = ["bf16"] if machine.bf16 else []
    dtypes = [machine.dtype] if plan.quick else ["fp32", *halves, "fp16"]
    count = len(machine.devices)
    if "correctness" in plan.groups:
        yield Stage("correctness", "GPU against CPU", lambda: against_cpu(plan, dtypes))
        for devices in dict.fromkeys((1, count)):
            for dtype in dtypes:
                yield Stage("correctness", f"layouts on {_gpus(devices)}, {dtype}", _layouts(plan, devices, dtype))
    if "speed" in plan.groups:
        for size in plan.sizes:
            yield Stage("speed", f"speed of {size}", _speed(plan, machine, size))
    if "scaling" in plan.groups and count > 1:
        yield Stage("scaling", f"speed of 1 to {_gpus(count)}", lambda: scaling(plan, machine))
    if "run" in plan.groups:
        yield Stage("run", "a training run and its plan", lambda: traced_run(plan, machine))
    if "profile" in plan.groups:
        yield Stage("profile", "torch's profile of a step", lambda: profiled(plan, machine))


def against_cpu(plan: Plan, dtypes: Sequence[str]) -> dict[str, Any]:
    """Losses and gradient norms on the GPU, in each data type, against those of the CPU in fp32."""
    same = "--use-cpu-initialization --attention-dropout 0 --hidden-dropout 0 --global-batch-size 4 --log-interval 1"
    words = [*plan.small_model, *same.split(), "--train-iters", str(plan.iterations), "--eval-iters", "0"]

    def train(name: str, *flags: str, **environ: str) -> list[Mapping[str, Any]]:
        metrics = plan.folder / "logs" / f"{name}.jsonl"
        metrics.unlink(missing_ok=True)
        command = ["pretrain_gpt2.py", *words, *flags, "--metrics-file", str(metrics)]
        run(plan, f"train-{name}", command, **environ)
        return [record for _, record in read_metrics(metrics) if "lm_loss" in record]

    cpu = train("cpu", DS_ACCELERATOR="cpu")
    rows = []
    for dtype in dtypes:
        flags = [] if dtype == "fp32" else [f"--{dtype}", "--zero-stage", "1"]
        flags += ["--initial-loss-scale", "4096"] * (dtype == "fp16")  # that no iteration is skipped
        gpu = train(f"gpu-{dtype}", *flags)
        loss, norm = (_largest_difference(cpu, gpu, key) for key in ("lm_loss", "grad_norm"))
        agrees = len(cpu) == len(gpu) and loss <= BOUNDS[dtype] and norm <= 10 * BOUNDS[dtype]
        rows.append({"dtype": dtype, "loss": loss, "grad_norm": norm, "bound": BOUNDS[dtype], "agrees": agrees})
    if wrong := [one["dtype"] for one in rows if not one["agrees"]]:
        raise Failed(f"{', '.join(wrong)} on the GPU differs from fp32 on the CPU", {"against_cpu": rows})
    return {"against_cpu": rows}


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


def _layouts(plan: Plan, devices: int, dtype: str) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
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

    return work


def _speed(plan: Plan, machine: Machine, size: str) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        results: list[Result] = []
        left_out, failures = {}, []
        for pair in PAIRS[:2] if plan.quick else PAIRS:
            try:
                results += compared(size, pair, plan.rounds, machine)
            except ResourceError as error:
                left_out[" and ".join(pair)] = error.messages[0]
            except LaunchError as error:
                failures.append(f"{' and '.join(pair)}: {last_line(error.messages[0])}")
                (plan.folder / "logs" / f"speed-{size}-{len(failures)}.txt").write_text(error.messages[0])
        found = {"rows": rows_of(results), "left_out": left_out}
        if failures:
            raise Failed("; ".join(failures), found)
        return found

    return work


def scaling(plan: Plan, machine: Machine) -> dict[str, Any]:
    """Tokens a second of one GPU, and of several by each kind of parallelism, with the same micro-batch."""
    count, size = len(machine.devices), largest(plan, machine)
    shape = replace(size, batch=max(1, size.batch // 2))  # room for the buffers of communication
    layouts = {
        f"{_gpus(1)}": (1, 1, ""),
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


class Failed(UserError):
    """A stage that failed and has a result none the less."""

    def __init__(self, message: str, result: dict[str, Any]):
        super().__init__(message)
        self.result = result


def run(plan: Plan, name: str, command: Sequence[str], **environ: str) -> None:
    """``python COMMAND`` in the project's folder, with its output in ``logs/NAME.txt``.

    Raises LaunchError with the last line of the output if it fails or takes too long.
    """
    log = plan.folder / "logs" / f"{name}.txt"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise LaunchError(f"not finished after {SECONDS} s, see {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        raise LaunchError(f"exit code {code}: {last_line(log.read_text(errors='replace'))} (see {log})")


def last_line(text: str) -> str:
    """The line that says most about a failure: the last error message, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror: " in line]
    return (errors or lines or ["no output"])[-1][:500]


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
