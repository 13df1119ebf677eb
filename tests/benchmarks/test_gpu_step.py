"""The measurement of a GPU: its code runs on a CPU, and a missing GPU is reported."""

import math
from pathlib import Path

from support.programs import Programs

from benchmarks.measures.peers import Shape

TINY = Shape(layers=2, hidden=32, heads=2, sequence=16, batch=2, vocabulary=64)


def test_a_machine_without_a_gpu_is_reported(programs: Programs) -> None:
    ended = programs.run("bash", "benchmarks/gpu.sh", "--rounds", "1", PYTHON="python")
    assert ended.returncode == 7
    assert ended.output.splitlines() == [
        "run.py: error: gpu_step measures a GPU, and torch sees none here: run it on a machine that has one"
    ]


def test_a_python_without_torch_is_reported(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    ended = programs.run("bash", "benchmarks/gpu.sh", PYTHON=str(tmp_path / "python"))
    assert ended.returncode == 2
    assert ended.output.startswith("gpu.sh: error: torch is not installed") and ended.output.count("\n") == 1


def test_every_variant_takes_steps(run_ranks_once) -> None:
    """In its tiny form, on the CPU."""
    ((speeds, peaks),) = run_ranks_once(1, measure_tiny)
    assert {peer for _, peer, _ in speeds} == {"bare torch", "transformers sdpa"} == {peer for _, peer in peaks}
    assert all(ratio > 0 and math.isfinite(ratio) for _, _, ratio in speeds)


def measure_tiny() -> tuple[list, list]:
    from benchmarks.comparing import Comparison
    from benchmarks.measures.gpu_step import compared, ways

    built = ways(TINY)
    results = compared("tiny", TINY, 1, {way: built[way] for way in ("suite", "bare torch", "transformers sdpa")})
    speeds = [(r.what, r.peer, r.ratios[0]) for r in results if isinstance(r, Comparison)]
    return speeds, [(r.what, r.peer) for r in results if not isinstance(r, Comparison)]
