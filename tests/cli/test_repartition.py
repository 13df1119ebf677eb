"""--repartition-from: the stages are balanced by the measured times of a trace."""

import json
from pathlib import Path

import pytest
from support.command_lines import complaints, parse

WORDS = "--pipe-parallel-size 2 --repartition-from"


def _trace(folder: Path, *seconds: float) -> Path:
    (folder / "trace.json").write_text(json.dumps({"otherData": {"unit_seconds": seconds}}))
    return folder


@pytest.mark.parametrize(
    "seconds, stages, layers",
    [
        ((0, 1, 1, 1, 1, 0), 2, "2,2"),
        ((0, 1, 1, 1, 3, 0), 2, "3,1"),
        ((3, 1, 1, 1, 1, 0), 2, "1,3"),
        ((0, 1, 1, 1, 1, 5), 2, "4,0"),
        ((0, 1e-6, 1e-6, 3e-6, 1e-6, 0), 4, "1,1,1,1"),
    ],
)
def test_stages_are_balanced(tmp_path: Path, seconds: tuple[float, ...], stages: int, layers: str) -> None:
    words = f"--pipe-parallel-size {stages} --repartition-from {_trace(tmp_path, *seconds)}"
    assert parse(words, ranks=stages).parallel.pipeline_partition == layers
    assert parse(f"{words}/trace.json", ranks=stages).parallel.pipeline_partition == layers


def test_two_model_chunks_per_stage(tmp_path: Path) -> None:
    words = f"{WORDS} {_trace(tmp_path, 0, 1, 1, 1, 1, 0)} --pipeline-schedule dualpipev --gas 4"
    assert parse(words, ranks=2).parallel.pipeline_partition == "1,1,1,1"


def test_two_partitions_are_refused(tmp_path: Path) -> None:
    words = f"{WORDS} {_trace(tmp_path, 0, 1, 1, 1, 1, 0)} --pipeline-partition 2,2"
    expected = f"--repartition-from {tmp_path} and --pipeline-partition 2,2 exclude each other: give one"
    assert complaints(words, ranks=2) == [expected]


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot be read (No such file or directory)"),
        ("{", "is not JSON"),
        ("[]", "has no times of layers"),
        ('{"otherData": {"unit_seconds": [0, 1, -1, 0]}}', "has no times of layers"),
        ('{"otherData": {"unit_seconds": [0, NaN, 1, 0]}}', "has no times of layers"),
        ('{"otherData": {"unit_seconds": [0, 1e300, 1, 0]}}', "has no times of layers"),
        ('{"otherData": {"unit_seconds": [0, 1, 1, 1, 0]}}', "has the times of 3 layers, and --num-layers is 4"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "trace.json").write_text(text)
    (printed,) = complaints(f"{WORDS} {tmp_path}/trace.json", ranks=2)
    assert printed.startswith("--repartition-from ") and message in printed
