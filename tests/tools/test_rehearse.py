"""Rehearsals of single ranks: what a rank takes, and what follows for the run."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import Programs

from megatron.cli import parse_run
from megatron.config import RunConfig
from megatron.tools.planning.machine import DEVICES, Machine
from megatron.tools.rehearsal.estimate import Expected
from megatron.tools.rehearsal.memory import highest_level, memory_profile
from megatron.tools.rehearsal.rehearse import representative_ranks

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --mock-data"
    " --vocab-size 512 --batch-size 2 --gas 4 --train-iters 100 --num-workers 0 --lr 1e-3"
).split()
PIPELINE = [*MODEL, "--pipe-parallel-size", "2", "--model-parallel-size", "2", "--bf16", "--zero-stage", "1"]


@pytest.fixture(scope="module")
def rehearsed(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last stage's rank 5 of eight, real and fake, as rehearsed by the tool with numbers that grow too large."""
    folder, found = tmp_path_factory.mktemp("rehearsed"), {}
    saving = ["--save", folder / "never", "--save-interval", "1"]
    growing = ["--lr", "1e30", "--max-consecutive-bad-steps", "1"]
    for name, flags in {"real": ["--steps", "2"], "fake": ["--fake"]}.items():
        words = ["--world-size", "8", "--rank", "5", "--devices-per-node", "8", "--json", folder / name, *flags]
        programs.warm(1, "tools/rehearse.py", *words, *PIPELINE, *saving, *growing).ok()
        (found[name],) = json.loads((folder / name).read_text())["ranks"]
    assert not (folder / "never").exists(), "nothing is saved"
    return found


def test_a_rank_takes_what_is_planned_and_issues_each_collective_of_its_layers(rehearsed: dict[str, Any]) -> None:
    from megatron.tools.planning.memory import stage_memory

    real = rehearsed["real"]
    assert real["seconds"]["wall"] > 0 and real["kernels"] > 0
    planned = stage_memory(run_of(PIPELINE))[1]
    held = real["memory_bytes"]
    assert {kind: held[kind] for kind in ("weights", "gradients", "optimizer")} == {
        kind: planned.parts()[kind] for kind in ("weights", "gradients", "optimizer")
    }
    assert held["peak"] == pytest.approx(planned.total, rel=0.15)
    reduced = [one for one in real["communication"] if one["kind"] == "all_reduce" and one["ranks"] == 2]
    in_forward = sum(one["times"] for one in reduced if one["phase"] == "ForwardPass")
    assert in_forward >= 4 * 2 * 2, "four micro-batches, two layers, after attention and MLP"
    assert sum(one["times"] for one in real["communication"] if one["kind"] == "recv") == 4
    assert {one["instruction"] for one in real["passes"]} >= {"ForwardPass", "BackwardPass", "OptimizerStep"}


def test_what_another_thread_frees_is_not_live() -> None:
    """As the buffers of collectives are freed."""
    buffers: list[torch.Tensor] = []
    with memory_profile() as profiler:
        for _ in range(50):
            buffers.append(torch.empty(10_000))
            freeing = threading.Thread(target=buffers.clear)
            freeing.start()
            freeing.join()
    assert highest_level(profiler) < 10 * 40_000


def test_a_fake_rank_takes_as_much_as_a_real_one(rehearsed: dict[str, Any]) -> None:
    real, fake = rehearsed["real"], rehearsed["fake"]
    assert "seconds" not in fake
    for name in ("kernels", "copies", "copied_bytes", "collectives", "sent_bytes"):
        assert fake[name] == real[name], name
    for kind, size in real["memory_bytes"].items():
        assert fake["memory_bytes"][kind] == pytest.approx(size, rel=0.03), kind


def run_of(words: list[str]) -> RunConfig:
    from megatron.training.preflight import check

    return check(parse_run(words, {"WORLD_SIZE": "8", "DS_ACCELERATOR": "cpu"}))[0]


def timed(number: int, **communication: Any) -> dict[str, Any]:
    """A rank that takes 2 s forward, 4 s backward and 1 s outside of passes, of a run with 4 micro-batches."""

    def both(seconds: float) -> dict[str, float]:
        return {"wall": seconds, "cpu": seconds}

    one = {
        "kind": "all_reduce", "size": 10**9, "ranks": 2, "span": 2, "phase": "ForwardPass", "is_overlapped": False,
        "times": 4,
    }  # fmt: skip
    passes = {"ForwardPass": both(2.0), "BackwardPass": both(4.0)}
    return {
        "rank": number,
        "seconds": both(25.0),
        "rounds": [both(24.0), both(25.0), both(27.0)],
        "phases": {"forward": both(8.0), "backward": both(16.0), "host": both(1.0)},
        "passes": [{"instruction": name, "chunk": 0, **seconds} for name, seconds in passes.items()],
        "communication": [{**one, **communication}] if communication else [],
    }


def test_the_step_of_a_pipeline_is_its_passes_with_the_bubble_and_what_is_waited_for() -> None:
    run = run_of(PIPELINE)
    machine = Machine(DEVICES["a100"]._replace(intra_bandwidth=1e9 / 0.75), 8)
    first, last = representative_ranks(run)
    assert (first, last) == (0, 4)
    alone = Expected(run, machine, [timed(first), timed(last)])
    assert alone.parts["passes"] == pytest.approx(24.0)
    assert alone.parts["bubble"] == pytest.approx(6.0), "(p - 1) (F + B)"
    assert alone.seconds == pytest.approx(31.0)
    assert alone.between == pytest.approx((30.0, 33.0))
    reduced = Expected(run, machine, [timed(first, times=4), timed(last, times=4)])
    assert reduced.parts["communication"] == pytest.approx(5.0), "1 s in each forward pass, and in the bubble's"
    hidden = Expected(run, machine, [timed(first, is_overlapped=True), timed(last, is_overlapped=True)])
    assert hidden.seconds == pytest.approx(31.0)
    assert hidden.between[1] == pytest.approx(33.0 + 4.0, rel=0.01)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--world-size 1000000000", "must be 1,000,000 at most"),
        ("--world-size 8 --rank 8", "rank 8 is not in a run of --world-size 8"),
        ("--world-size 8 --doctor README.md", "--doctor README.md has no measured all-reduce"),
        ("--world-size 8 --rank 1 --ranks 0", "--rank 1 and --ranks 0 exclude each other"),
        ("--world-size 8 --ranks ٠", "--ranks ٠: write numbers"),
        ("--world-size 8 --doctor {bandwidth}-1", "has no measured all-reduce"),
        ("--world-size 8 --doctor {bandwidth}true", "has no measured all-reduce"),
        ("--world-size 8 --doctor {bandwidth}1e-320", "has no measured all-reduce"),
        ("--world-size 8 --doctor {bandwidth}hosts", "has no measured all-reduce"),
        ("--world-size 8 --doctor /dev/zero", "--doctor /dev/zero: a device"),
    ],
)
def test_a_mistake_is_one_line(tool, tmp_path: Path, words: str, message: str) -> None:
    for value in ("-1", "true", "1e-320"):
        report = f'{{"hosts": {{"a": {{}}}}, "all_reduce": {{"bytes_per_second": {value}}}}}'
        (tmp_path / f"report{value}").write_text(report)
    (tmp_path / "reporthosts").write_text('{"hosts": "ab", "all_reduce": {"bytes_per_second": 25e9}}')
    ended = tool("rehearse", *MODEL, *words.format(bandwidth=tmp_path / "report").split())
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and message in ended.stderr
