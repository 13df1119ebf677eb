"""The profilers of torch and DeepSpeed record the requested iterations."""

import json
from pathlib import Path


def test_both_profilers_beside_a_trace(train_in_ranks, tmp_path: Path) -> None:
    settings = "--train-iters 4 --batch-size 1 --gas 2 --eval-iters 0 --trace-steps 4:9"
    looks = "--profile-steps 2:3 --flops-profile-step 2"
    output = train_in_ranks(1, *settings.split(), *looks.split(), "--trace", tmp_path)
    assert f"  wrote the trace to {tmp_path}: trace.json, schedule.svg" in output.splitlines()
    assert f"  wrote the profile to {tmp_path}: profile-rank*.txt and .json" in output.splitlines()
    assert {path.name for path in tmp_path.iterdir()} == {
        "flops-profile.txt", "profile-rank0.json", "profile-rank0.txt", "schedule.svg", "trace.json"
    }  # fmt: skip
    names = [event["name"] for event in json.loads((tmp_path / "profile-rank0.json").read_text())["traceEvents"]]
    assert [names.count(f"iteration {n}") for n in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert names.count("ForwardPass of micro-batch 2") == 2 and "aten::addmm" in names
    assert "Self CPU %" in (tmp_path / "profile-rank0.txt").read_text()
    counted = (tmp_path / "flops-profile.txt").read_text()
    assert "Profile Summary at step 2:" in counted and "ParallelTransformerLayer" in counted
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["iteration"] for event in trace if event["ph"] == "X"} == {4}, "the run ends before 9"
