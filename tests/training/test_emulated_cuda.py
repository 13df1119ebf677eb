"""The code paths of a GPU, on a CUDA device emulated in host memory: real numbers, DeepSpeed's CUDA accelerator.

Not shown here: NCCL, kernels of a GPU, streams that overlap, speed. See docs/gpu-status.md.
"""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.emulated_cuda import EmulatedCuda
from support.layouts import layout
from support.programs import TINY_MODEL, Finished, Programs, read_metrics
from support.warm import places

ITERATIONS, SAVED = 4, 2
SETTINGS = (
    f"--train-iters {ITERATIONS} --batch-size 2 --global-batch-size 4 --eval-iters 0 --save-interval {SAVED}"
    " --make-vocab-size-divisible-by 2 --use-cpu-initialization"
).split()
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0".split()
BOUNDS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
"""Relative differences of losses from fp32 on the CPU, which the rounding explains."""
PIPELINE, TENSOR = "bf16 pp2 zero1 recompute", "fp16 tp2 sp overlap zero1 --async-save"
LAYOUTS = [
    "dp1",
    "bf16 dp2 zero2",
    "fp16 dp2 zero3",
    PIPELINE,
    TENSOR,
    "bf16 pp2 dualpipev --batch-size 1",
    "bf16 ulysses2 zero3",
    "fp16 dp2 zero3 offload --offload-param cpu",
]
SPIKE = "--batch-size 2 --global-batch-size 8 --eval-iters 0 --save-interval 8 --rewind-on-spike"
SPIKE += " --use-cpu-initialization"


class Runs:
    """Runs without dropout in one folder, each with its checkpoints and metrics under its name."""

    def __init__(self, programs: Programs, emulated_cuda: EmulatedCuda, folder: Path):
        self._programs, self._cuda, self._folder = programs, emulated_cuda, folder

    def losses(self, name: str) -> list[float]:
        """Losses of an uninterrupted run on emulated GPUs; of one process on the CPU if the layout is ``cpu``."""
        metrics = self._folder / name / "metrics"
        if not metrics.exists():
            words = (*SETTINGS, *NO_DROPOUT, "--save", metrics.parent, "--metrics-file", metrics)
            processes, flags = layout("dp1" if name == "cpu" else name)
            start = self._programs if name == "cpu" else self._cuda
            start.pretrain(processes, *words, *flags.split()).ok()
        return losses(metrics)

    def checkpoint(self, name: str, folder: Path) -> Path:
        """A copy of what that run saved halfway."""
        self.losses(name)
        tag = f"global_step{SAVED}"
        shutil.copytree(self._folder / name / tag, folder / tag)
        (folder / "latest").write_text(tag)
        return folder


@pytest.fixture(scope="module")
def runs(programs: Programs, emulated_cuda: EmulatedCuda, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(programs, emulated_cuda, tmp_path_factory.mktemp("emulated"))


def losses(metrics: Path) -> list[float]:
    return [line["lm_loss"] for line in read_metrics(metrics) if "lm_loss" in line]


def bound(name: str) -> float:
    return BOUNDS.get(name[:4], BOUNDS["fp32"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_the_cpu(runs: Runs, name: str) -> None:
    assert runs.losses(name) == pytest.approx(runs.losses("cpu"), rel=bound(name))


@pytest.mark.parametrize("target", [TENSOR, "fp16 dp2 zero3"])
def test_a_resumed_run_continues(runs: Runs, emulated_cuda: EmulatedCuda, tmp_path: Path, target: str) -> None:
    """On another layout the count of updates has to be on the GPU, where torch's fused AdamW reads it."""
    processes, flags = layout(target)
    found = tmp_path / "metrics"
    saved = runs.checkpoint(TENSOR, tmp_path / "saved")
    folders = ("--load", saved, "--save", tmp_path / "resumed", "--metrics-file", found)
    emulated_cuda.pretrain(processes, *SETTINGS, *NO_DROPOUT, *flags.split(), *folders).ok()
    assert losses(found) == pytest.approx(runs.losses(TENSOR)[SAVED:], rel=0 if target == TENSOR else bound(target))


def test_random_streams_of_the_gpu_continue(emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """With dropout, stopping and resuming equals not stopping, to the last bit."""
    save = ("--save", tmp_path / "ck", "--load", tmp_path / "ck", "--metrics-file", tmp_path / "parts")
    emulated_cuda.pretrain(1, *SETTINGS, "--metrics-file", tmp_path / "whole").ok()
    emulated_cuda.pretrain(1, *SETTINGS, *save, "--exit-interval", str(SAVED)).ok()
    emulated_cuda.pretrain(1, *SETTINGS, *save).ok()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.parametrize(("source", "target"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_resuming_on_the_other_kind_of_device(
    runs: Runs, programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path, source: str, target: str
) -> None:
    """On the same layout: weights and moments continue; random states of another length do not, and a line says so."""
    start: Programs | EmulatedCuda = emulated_cuda if target == "gpu" else programs
    checkpoint = runs.checkpoint("cpu" if source == "cpu" else "dp1", tmp_path / "saved")
    folders = ("--load", checkpoint, "--metrics-file", tmp_path / "metrics")
    finished = start.pretrain(1, *SETTINGS, *NO_DROPOUT, *folders).ok()
    line = "> saved on another kind of device: random streams restart from --seed and the iteration"
    assert line in finished.output.splitlines()
    assert losses(tmp_path / "metrics") == pytest.approx(runs.losses("cpu")[SAVED:], rel=BOUNDS["fp32"])


def test_apex_trains(runs: Runs, programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """With a package of apex's interface: its norm on an fp32 residual stream, sequence parallel, and its Adam."""
    flags = "--fused-kernels apex --bf16 --zero-stage 1 --model-parallel-size 2 --sequence-parallel"
    flags += " --fp32-residual-connection"
    words = (*TINY_MODEL, *programs.data_arguments, *SETTINGS, *NO_DROPOUT, *flags.split())
    program = ("tests/support/apex_pretrain.py", *words, "--save", tmp_path, "--metrics-file", tmp_path / "metrics")
    finished = emulated_cuda.run(2, *program).ok()
    assert "> optimizer apex FusedAdam; layer norm of apex" in finished.output
    assert losses(tmp_path / "metrics") == pytest.approx(runs.losses("cpu"), rel=BOUNDS["bf16"])


def test_a_spike_in_an_iteration_that_is_not_logged(
    programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path
) -> None:
    """A GPU's loss is read after the next iteration, but before that one is saved: it is skipped as on a CPU."""
    fault = "samples 176 179 50"
    words = f"--train-iters 26 {SPIKE} --log-interval 7 --save {tmp_path}/ck".split() + NO_DROPOUT
    program = ("tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments, *words)
    finished = emulated_cuda.run(1, *program, "--metrics-file", tmp_path / "gpu", FAULT=fault).ok()
    assert "iteration 23: the loss of" in finished.output and "is a spike over" in finished.output
    assert f"rewinding to {tmp_path / 'ck' / 'global_step16'}, skipping samples 176 to 183" in finished.output
    assert (tmp_path / "ck" / "latest").read_text() == "global_step26"
    shutil.rmtree(tmp_path / "ck")
    programs.faulty(1, fault, *words, "--metrics-file", tmp_path / "cpu").ok()
    assert losses(tmp_path / "gpu")[-1] == pytest.approx(losses(tmp_path / "cpu")[-1], rel=BOUNDS["fp32"])


def test_a_hung_rank_is_named(programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """While another waits for it in a collective on GPUs."""
    words = (*SETTINGS, "--save", tmp_path, "--watchdog-minutes", "0.1", "--bf16", "--zero-stage", "1")
    program = ("tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments)
    finished = emulated_cuda.run(2, *program, *words, FAULT="sleep 1 2")
    assert finished.returncode == 6, finished.output[-3000:]
    assert re.search(r"error: .*rank 1.* training, iteration 2", finished.output), finished.output[-3000:]


def test_out_of_memory_names_what_would_fit(emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    words = (*SETTINGS, "--global-batch-size", "64", "--batch-size", "64", "--save", tmp_path)
    finished: Finished = emulated_cuda.pretrain(1, *words, EMULATED_CUDA_MEMORY=str(12_000_000))
    assert finished.returncode == 7, finished.output[-3000:]
    assert "Traceback" not in finished.output
    pattern = r"error: rank 0: out of memory in training, iteration 1: .* GB were requested.*; --\S.* would take \S+ GB"
    assert re.search(pattern, finished.output), finished.output[-3000:]
    assert (tmp_path / "memory-rank0.pickle").exists(), "torch's snapshot, which only CUDA has"


def test_a_process_without_a_gpu_is_named(programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """By itself: the first process of the host has one, and does not see what is wrong."""
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    words = ("pretrain_gpt2.py", *TINY_MODEL, *programs.data_arguments, *SETTINGS, "--save", tmp_path)
    finished = emulated_cuda.run(1, *words, EMULATED_CUDA_DEVICES="1", **place)
    assert finished.returncode == 7, finished.output[-3000:]
    assert "error: rank 1: process 1 of this host has no device: torch finds 1 of cuda; start fewer" in finished.output


def test_ranks_can_share_a_gpu(runs: Runs, programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """With collectives through host memory, as on a machine with one real GPU."""
    words = (*TINY_MODEL, *programs.data_arguments, *SETTINGS, *NO_DROPOUT, *layout(PIPELINE)[1].split())
    folders = ("--metrics-file", tmp_path / "metrics", "--save", tmp_path)
    environ = {**emulated_cuda.environ, "EMULATED_CUDA_DEVICES": "1", "ONE_GPU": "1"}
    command = ("pretrain_gpt2.py", *words, *folders)
    with ThreadPoolExecutor() as pool:
        for started in [pool.submit(programs.python, *command, **rank) for rank in places(2, environ)]:
            started.result().ok()
    assert losses(tmp_path / "metrics") == pytest.approx(runs.losses(PIPELINE), rel=1e-6)


def test_generation_and_evaluation(runs: Runs, programs: Programs, emulated_cuda: EmulatedCuda, tmp_path: Path) -> None:
    """The same text and perplexity on the GPU as on the CPU, from a checkpoint of two tensor-parallel GPUs."""
    checkpoint = runs.checkpoint(TENSOR, tmp_path / "saved")
    words = ("tools/generate.py", "--load", checkpoint, "--prompt", "w1 w2 w3", "--greedy", "--new-tokens", "8")
    on_gpu, on_cpu = emulated_cuda.run(1, *words).ok(), programs.warm(1, *words).ok()
    assert on_gpu.output.splitlines()[-1] == on_cpu.output.splitlines()[-1]
    assert "w1 w2 w3" in on_gpu.output
    (tmp_path / "text").write_text("w1 w2 w3 w4 w5 " * 40)
    words = ("tools/evaluate.py", "--load", checkpoint, "--task", "PPL", "--valid-data", tmp_path / "text")
    on_gpu, on_cpu = emulated_cuda.run(1, *words).ok(), programs.warm(1, *words).ok()
    found, expected = (float(re.findall(r'"perplexity": ([\d.]+)', run.output)[0]) for run in (on_gpu, on_cpu))
    assert found == pytest.approx(expected, rel=BOUNDS["fp32"])
