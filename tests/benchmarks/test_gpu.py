"""benchmarks/gpu.sh: its checks of a machine, its stages on the CPU or an emulated GPU, and its page."""

import json
import math
import os
import re
import signal
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.emulated_cuda import EmulatedCuda
from support.programs import Programs

from benchmarks.gpu import machine as machines
from benchmarks.gpu import speed
from benchmarks.gpu.command import FIGURES, main, run_stages
from benchmarks.gpu.correctness import layouts_of
from benchmarks.gpu.machine import Device, Machine, is_supported, problems
from benchmarks.gpu.plan import Failed, Plan, Stage
from benchmarks.gpu.report import PAGE, RESULTS, read_results, render
from benchmarks.gpu.speed import COMPILED, PAIRS, SHAPES, fitting, results_of, speeds_of
from benchmarks.gpu.stages import GROUPS, REHEARSALS, scaled_layouts
from benchmarks.measures.shapes import Shape
from benchmarks.tables import read_json, rows_of
from megatron.cli import read_run
from megatron.common.errors import ConfigError, LaunchError, ResourceError
from megatron.tools.verify.request import make_request, parse_layout, rule_violations

TINY = Shape(layers=2, hidden=32, heads=2, sequence=16, batch=2, vocabulary=64)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 85_000_000_000, 84_000_000_000)
MACHINE = Machine(
    versions={"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.20.2"}, expected="cuda", driver="580.95.05",
    cuda="13.0", architectures=["sm_75", "sm_80", "sm_90", "compute_120"], bf16=True, devices=[H100, H100],
)  # fmt: skip
NO_GPU = replace(MACHINE, devices=[])


def test_the_script_needs_a_python_with_torch(programs: Programs, tmp_path: Path) -> None:
    """And starts the command with it."""
    for code, text in ((1, "exit 1"), (0, 'echo "$@"')):
        (tmp_path / f"python{code}").write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / f"python{code}").chmod(0o755)
    ended = programs.run("bash", "benchmarks/gpu.sh", PYTHON=str(tmp_path / "python1"))
    assert ended.returncode == 2
    assert ended.output.startswith("gpu.sh: error: torch is not installed") and ended.output.count("\n") == 1
    started = programs.run("bash", "benchmarks/gpu.sh", "--rounds", "1", PYTHON=str(tmp_path / "python0")).ok()
    assert started.output.splitlines()[-1] == "benchmarks/gpu/command.py --rounds 1"


@pytest.mark.parametrize(
    ("machine", "code", "message"),
    [
        (replace(MACHINE, versions={"torch": "2.13.0"}), 2, "deepspeed is not installed for "),
        (replace(NO_GPU, expected="cpu", driver=None), 7, "there is none here: run it on a machine that has one"),
        (replace(NO_GPU, cuda=None), 2, "torch 2.13.0 is built without CUDA, and this machine has a GPU: install anot"),
        (replace(NO_GPU, driver="535.1"), 7, "driver 535.1 is too old for CUDA 13.0.*update it to 580 or later"),
        (replace(NO_GPU, error="CUDA unknown error"), 7, "finds no GPU, although this .* has one: CUDA unknown error"),
        (replace(MACHINE, error="ImportError: x"), 2, "torch or DeepSpeed cannot be used: ImportError: x"),
        (replace(MACHINE, expected="cpu"), 2, "DS_ACCELERATOR selects cpu, and this measures CUDA devices: unset it"),
        (
            replace(MACHINE, architectures=["sm_75"]),
            7,
            r"no kernels for GPU 0 \(NVIDIA H100.* 9.0, only sm_75: install",
        ),
        (replace(MACHINE, devices=[H100, replace(H100, free=1)]), 7, "GPU 1: NVIDIA H100.*0.0 of 85.0 GB free, 3 GB"),
    ],
)
def test_what_keeps_a_machine_from_training_is_named(machine: Machine, code: int, message: str, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    problem = next(problems(machine))
    assert problem.exit_code == code and re.search(message, str(problem)), problem
    assert not list(problems(MACHINE))


@pytest.mark.parametrize(
    ("capability", "architectures", "supported"),
    [
        ((8, 6), ["sm_80"], True),  # of the same major version
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # PTX is compiled by the driver
        ((7, 0), ["sm_75", "compute_75"], False),
        ((12, 0), ["sm_120a"], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_kernels_of_a_torch_fit_a_gpu(capability, architectures, supported) -> None:
    assert is_supported(capability, architectures) is supported


def test_micro_batches_are_halved_until_they_fit() -> None:
    batches = {name: fitting(shape, H100.free).batch for name, shape in SHAPES.items()}
    assert batches == {name: shape.batch for name, shape in SHAPES.items()}, "all of them on 80 GB"
    assert fitting(SHAPES["125M"], 16_000_000_000).batch < 16
    with pytest.raises(ResourceError, match="needs about 59 GB, and 24 GB are free"):
        fitting(SHAPES["1.3B"], 24_000_000_000)
    assert SHAPES["345M"].parameters == pytest.approx(355e6, rel=0.01)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layouts_that_are_compared_are_supported_and_fit(devices: int, dtype: str, tmp_path: Path) -> None:
    names = layouts_of(devices, dtype, quick=False)
    layouts = [parse_layout(name) for name in names]
    words = [*a_plan(tmp_path).small_model, "--global-batch-size", "16", *([] if dtype == "fp32" else [f"--{dtype}"])]
    request = make_request(words, 5, layouts[0], {"DS_ACCELERATOR": "cuda"})
    assert not rule_violations(request, layouts)
    assert len(names) == len(set(names)) and max(layout.processes for layout in layouts) == devices
    assert set(layouts_of(devices, dtype, quick=True)) < set(names)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_runs_whose_speed_is_compared_are_supported(devices: int) -> None:
    machine = replace(MACHINE, versions={**MACHINE.versions, "triton": "3"}, compiler="cc", devices=[H100] * devices)
    names = []
    for name, processes, data, flags in scaled_layouts(devices, machine):
        words = [*SHAPES["1.3B"].words, "--mock-data", "--vocab-size", "50304", "--train-iters", "30", "--bf16"]
        words += [*flags.split(), *([] if "--zero-stage" in flags else ["--zero-stage", "1"])]
        words += ["--global-batch-size", str(16 * processes)]
        environ = {"DS_ACCELERATOR": "cuda", "WORLD_SIZE": str(processes)}
        run = read_run(words, environ).checked()
        assert processes <= devices and run.parallel.data_parallel_size == data
        names.append(name)
    assert {f"{kind} {devices}" for kind in ("DP", "PP", "CP")} <= {*names} and f"DP {devices}, FP8" in names


def test_runs_whose_ranks_are_rehearsed_are_supported() -> None:
    for processes, rank, flags in REHEARSALS.values():
        words = [*flags.split(), "--mock-data", "--train-iters", "30", "--bf16", "--zero-stage", "1", "--compile"]
        run = read_run(words, {"DS_ACCELERATOR": "cuda", "WORLD_SIZE": str(processes)}).checked()
        assert rank < run.parallel.world_size == processes


def a_plan(folder: Path, groups=GROUPS) -> Plan:
    for name in ("logs", "run"):
        (folder / name).mkdir(exist_ok=True)
    return Plan(("tiny",), groups, 1, True, False, folder)


TIMES = {"wall": [1.0, 2.0], "cpu": [1.0, 2.0]}
MEASURED = {"times": {"suite": TIMES, "bare torch": TIMES}, "peaks": {"suite": 10**9, "bare torch": 2 * 10**9}}


def test_a_pair_that_runs_out_of_memory_is_measured_with_half_the_batch(tmp_path: Path, monkeypatch) -> None:
    batches: list[int] = []

    def measured(plan: Plan, name: str, module: str, request: str) -> dict:
        batches.append(json.loads(request)["shape"]["batch"])
        return MEASURED if batches[-1] <= most else {"out of memory": True}

    monkeypatch.setattr(speed, "measured", measured)
    most = 4
    found = speed.compared(a_plan(tmp_path), "125M", PAIRS[2], MACHINE)
    assert batches == [16, 8, 4] and found["rows"][0]["what"].startswith(
        "125M, bf16, suite: 12 layers, h 768, s 1024, "
    )
    assert found["speeds"][0]["way"] == "suite" and found["speeds"][0]["tflops"] > 0
    most = 0
    with pytest.raises(ResourceError, match="out of memory even with a micro-batch of 1"):
        speed.compared(a_plan(tmp_path), "125M", PAIRS[2], MACHINE)


LAYOUT = {
    "layout": "tp2-pp0-dp1", "agrees": False, "failure": None, "loss": 0.5, "grad_norm": None, "first": "loss of it. 1"
}  # fmt: skip
LINKS = [
    {"operation": name, "bytes": size << 20, "seconds": 0.001, "bandwidth": size * 2.5e9}
    for size in (1, 256) for name in ("all-reduce", "to the next GPU")
]  # fmt: skip
WALL = {"wall": 0.02, "cpu": 0.01}
RANK = {
    "seconds": WALL, "launched_seconds": 0.015, "phases": {"forward": WALL, "backward": WALL}, "kernels": 1234,
    "copies": 10, "host_waits": 0, "memory_bytes": {"peak": 43_000_000_000},
}  # fmt: skip
REHEARSAL = {"ranks": [RANK], "expected": {"seconds": 0.025, "mfu": 0.4321}}
RACES = [
    {"run": "ZeRO 1", "ranks": 2, "agrees": True},
    {"run": "PP 2", "ranks": 2, "agrees": False, "failure": "irecv at transfers.py: nothing waits for it"},
]
PROFILE = {
    "seconds": 0.1, "on_device": True, "busy": 0.12, "kinds": {"matmuls": 0.12},
    "longest": [{"name": "sm90_xmma_gemm<float>", "calls": 3, "seconds": 0.12}],
}  # fmt: skip


def test_a_failed_stage_does_not_end_the_others_and_the_page_has_all(tmp_path: Path, capsys) -> None:
    """Recorded results of each kind, one failure of each kind, and a page that can be made again from the JSON."""
    rows = rows_of(list(results_of("tiny, bf16", TINY, MEASURED, H100.name)))
    layouts = {"iterations": 3, "tolerances": {"loss": 1e-4}, "layouts": [LAYOUT]}
    against = [{"model": "GPT-2", "dtype": "bf16", "loss": 1e-3, "grad_norm": 2e-3, "bound": 1e-2, "agrees": True}]
    kernels = [{"kernel": "varlen_attn", "dtype": "bf16", "difference": 3e-3, "bound": 1e-2, "agrees": True}]
    kernels += [
        {"kernel": "SwiGLU", "dtype": "bf16", "difference": None, "bound": 1e-2, "agrees": False, "failure": "x"}
    ]
    choices = [{"what": "bf16, head dim 72", "named": "flash", "found": "plain", "agrees": False}]
    scaled = [{"layout": name, "devices": n, "tokens_per_second": 90.0 * n} for name, n in (("1 GPU", 1), ("TP 2", 2))]
    results = {
        "GPU against CPU": {"against_cpu": against},
        "kernels": {"kernels": kernels, "choices": choices},
        "layouts": Failed("tp2-pp0-dp1 differ or failed", {"layouts": layouts}),
        "speed": {"rows": rows, "speeds": speeds_of("345M", TINY, {"times": {COMPILED: TIMES}}, H100.name)},
        "links": {"links": LINKS, "ranks": 2},
        "rehearsal": {"rehearsal": REHEARSAL},
        "races": Failed("differ or failed: PP 2", {"races": RACES}),
        "scaling": {"scaling": scaled, "shape": "2 layers"},
        "run": {"run": "run", "shape": "2 layers", "tokens_per_second": 5.0},
        "profile": {"profile": PROFILE, "shape": "2 layers", "trace": "profile.json.gz"},
        "user": LaunchError("exit code 1: boom <b>"),
        "large": ResourceError("needs about 58 GB"),
        "bug": ZeroDivisionError("by zero"),
    }

    def work(result):
        def run():
            if isinstance(result, Exception):
                raise result
            return result

        return run

    todo = [Stage(name, name, work(result)) for name, result in results.items()]
    content = run_stages(todo, a_plan(tmp_path), MACHINE)
    found = {stage["name"]: (stage["status"], stage["reason"]) for stage in content["stages"]}
    assert found["layouts"] == ("failed", "tp2-pp0-dp1 differ or failed")
    assert found["user"] == ("failed", "exit code 1: boom <b>") and found["large"] == ("left out", "needs about 58 GB")
    assert found["bug"] == ("failed", "ZeroDivisionError: by zero")
    assert [name for name, (status, _) in found.items() if status == "passed"] == [
        *("GPU against CPU", "kernels", "speed", "links", "rehearsal", "scaling", "run", "profile")
    ]
    page = (tmp_path / PAGE).read_text()
    assert page == render(read_results(tmp_path), tmp_path)
    for text in (
        *(
            "8 stages of 13 passed, 1 left out; failed: layouts, races, user, bug",
            "boom &lt;b&gt;",
            "differs, first in loss of it. 1",
        ),
        *("GPU 1</th><td>NVIDIA H100 80GB HBM3, 84.0 of 85.0 GB free"),
        *("of the peak", "1.00 (1.00 to 1.00)", "100%", "sm90_xmma_gemm&lt;float&gt;", "the GPU computed for"),
        *(
            "1.0e-03",
            "The run cannot be shown: ",
            "Of 1 kinds of attention, 0 get the kernel",
            "varlen_attn",
            "3.0e-03",
        ),
        *("nothing waits for it", "43.2%", "256 MiB", "640", "40.0%", "missed"),
    ):
        assert text in page, text
    assert not re.search(r"(?:src|href)=", page), "all of it is in the file"
    name, measured_on, figures = read_json(tmp_path / FIGURES)
    assert (name, len(figures)) == ("gpu_step", 2) and H100.name in measured_on
    assert "[11/13] user ... failed (0 s): exit code 1: boom <b>" in capsys.readouterr().out


def test_a_run_on_an_emulated_gpu_is_on_the_page(emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """The whole command with one of its stages."""
    folder = tmp_path / "found"
    words = ("benchmarks/gpu/command.py", "--size", "tiny", "--quick", "--stages", "run", "--output", folder)
    ended = emulated_cuda.run(1, *words, EMULATED_CUDA_DEVICES="1").ok()
    assert ended.output.splitlines()[-2:] == ["1 stage of 1 passed", f"{folder}.tar.gz"]
    content = json.loads((folder / RESULTS).read_text())
    assert content["machine"]["devices"][0]["name"] == "emulated GPU"
    assert content["stages"][0]["result"]["tokens_per_second"] > 0
    page = (folder / PAGE).read_text()
    assert "emulated GPU" in page and "Plan against measurement" in page and "cannot be shown" not in page


FAKE_STAGES = """
import json, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background jobs ignore
sys.path.insert(0, ".")
from benchmarks.gpu import command, machine, plan

def hangs(its_plan):
    program = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    return lambda: plan.run(its_plan, "hangs", ["-c", program], 2)

def stages(its_plan, _):
    yield plan.Stage("links", "good", lambda: {"text": plan.run(its_plan, "good", ["-c", "print('x' * 300000)"])[:2]})
    yield plan.Stage("links", "hangs", hangs(its_plan))
    yield plan.Stage("links", "hangs again", hangs(its_plan))
    yield plan.Stage("links", "too late", lambda: {})

plan._SHORT, plan._LEAST = 3, 0.6
found = machine.from_json(json.loads(sys.argv.pop(1)))
command.probe, command.checked = lambda: found, lambda *_: found
command.stages, command._BEGIN, sys.argv[0] = stages, time.monotonic(), "gpu.sh"
command.run_tool(command.main)
"""
"""Begins the command with the stages of a test, the second of which hangs on two ranks."""


def archived(folder: Path) -> tuple[dict[str, tuple[str, str | None]], str]:
    """Status and reason of each stage, and the log of what hangs, from the archive alone."""
    with tarfile.open(f"{folder}.tar.gz") as tar:
        files = {member.name: tar.extractfile(member).read().decode() for member in tar.getmembers()}
    assert sum(map(len, files.values())) < 200_000
    stages = json.loads(files[f"{folder.name}/{RESULTS}"])["stages"]
    page = files[f"{folder.name}/{PAGE}"]
    assert all(stage["name"] in page and (stage["reason"] or "") in page for stage in stages)
    return {stage["name"]: (stage["status"], stage["reason"]) for stage in stages}, files[
        f"{folder.name}/logs/hangs.txt"
    ]


def test_the_time_is_kept_and_what_it_did_not_suffice_for_is_named(programs: Programs, tmp_path: Path) -> None:
    words = ("-c", FAKE_STAGES, json.dumps(asdict(MACHINE)), "--minutes", "0.12", "--output", tmp_path / "found")
    ended = programs.python(*words, time_limit=60)
    assert ended.returncode == 1 and ended.output.splitlines()[-1] == str(tmp_path / "found.tar.gz"), ended.output
    stages, log = archived(tmp_path / "found")
    assert stages["good"] == ("passed", None)
    assert stages["hangs"][0] == stages["hangs again"][0] == "failed" and stages["hangs"][1].startswith("not finished")
    assert stages["too late"] == ("left out", "no time is left of --minutes 0.12")
    assert not any(map(is_alive, pids(log)))
    words = ["0.05" if word == "0.12" else word for word in words]
    again = programs.python(*words, "--continue", time_limit=60)
    assert "[1/3] hangs ..." in again.output and archived(tmp_path / "found")[0]["good"] == ("passed", None)


def test_an_interrupted_check_leaves_an_archive(programs: Programs, tmp_path: Path) -> None:
    words = ("python", "-c", FAKE_STAGES, json.dumps(asdict(MACHINE)), "--output", tmp_path / "found")
    log = tmp_path / "found/logs/hangs.txt"
    with programs.started(tmp_path / "output", *words) as process:
        wait_for(lambda: log.exists() and len(pids(log.read_text())) == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    assert (tmp_path / "output").read_text().splitlines()[-1] == str(tmp_path / "found.tar.gz")
    stages, text = archived(tmp_path / "found")
    assert stages.pop("good") == ("passed", None) and set(stages.values()) == {("left out", "interrupted")}
    assert len(stages) == 3 and not any(map(is_alive, pids(text)))


def pids(log: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"pid (\d+)\n", log)]


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--stages", "none", "run"], "--stages none checks the machine alone"),
        (["--report", "docs"], "docs/gpu.json: cannot be read (No such file or directory); name a folder of"),
    ],
)
def test_wrong_usage(words: list[str], message: str, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.sh", *words])
    monkeypatch.chdir(Path(__file__).parents[2])
    with pytest.raises(ConfigError, match=re.escape(message)):
        main()


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(machines, "LEAST_DISK", 1e30)
    with pytest.raises(ResourceError, match="GB free, .* are needed: make room"):
        machines.checked(MACHINE, tmp_path / "not" / "yet")


def test_every_variant_takes_steps(run_ranks_once) -> None:
    """In its tiny form, on the CPU."""
    ((speeds, peaks),) = run_ranks_once(1, measure_tiny)
    assert {peer for _, peer, _ in speeds} == {"bare torch", "transformers sdpa"} == {peer for _, peer in peaks}
    assert all(ratio > 0 and math.isfinite(ratio) for _, _, ratio in speeds)


def measure_tiny() -> tuple[list, list]:
    from benchmarks.comparing import Comparison
    from benchmarks.measures.gpu_step_ranks import compared, ways

    built, results = ways(TINY, "bf16"), []
    for pair in PAIRS[2:4]:
        found = compared(TINY, 1, {way: built[way] for way in pair})
        results += results_of("tiny", TINY, found, "a GPU")
    speeds = [(r.what, r.peer, r.ratios[0]) for r in results if isinstance(r, Comparison)]
    return speeds, [(r.what, r.peer) for r in results if not isinstance(r, Comparison)]
