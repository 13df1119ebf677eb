"""tools/audit_data.py as a user starts it: the output of each command, and errors for bad input."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from audit.conftest import Restarted
from support.programs import Programs

from megatron.common import reading


@pytest.fixture
def audit(tool: Callable) -> Callable[..., tuple[int, str, str]]:
    """``audit(*words)``: exit code, stdout and stderr of the tool, in this process."""
    return partial(tool, "audit_data")


def test_each_command(audit: Callable, restarted: Restarted, tmp_path: Path) -> None:
    load = ("--load", restarted.checkpoints)
    code, output, _ = audit("batch", *load, "--iteration", 2, "--rank", 1, "--characters", 20)
    lines = output.splitlines()
    assert code == 0 and lines[0] == "iteration 2: 4 samples on PP 1, DP 2, SP 1, TP 1, samples of rank 1"
    assert [line for line in lines if line.startswith("sample")] == [
        f"sample {number}, data-parallel rank 1" for number in (6, 7)
    ]
    assert all("_text_document document " in line and len(line.split(": ")[1]) < 30 for line in lines if line[0] == " ")
    code, output, _ = audit("batch", *load, "--iteration", 5, "--json")
    batch = json.loads(output)
    assert code == 0 and [row["sample"] for row in batch["samples"]] == [16, 17, 18, 19]
    pieces = [piece["tokens"] for row in batch["samples"] for piece in row["pieces"]]
    assert sum(stop - start for start, stop in pieces) == 4 * 33

    code, output, _ = audit("seen", *load, "--output", tmp_path / "seen.tsv")
    assert code == 0 and "epochs up to iteration 6" in output and "more than once" in output
    rows = [line.split("\t") for line in (tmp_path / "seen.tsv").read_text().splitlines()]
    assert rows[0] == ["data", "document", "tokens", "seen"] and len(rows) == 1 + 160 + 80
    assert sum(int(row[2]) * float(row[3]) for row in rows[1:]) == pytest.approx(6 * 4 * 32, rel=1e-4)

    code, output, _ = audit("proof", *load, "--metrics-file", restarted.metrics)
    assert code == 0 and output.endswith("proven: no sample was repeated, none was skipped\n")
    assert "repeated after a restart or a spike: iterations 3 to 4" in output
    code, output, _ = audit("proof", *load, "--metrics-file", restarted.metrics, "--json")
    assert json.loads(output)["proven"] is True

    code, output, _ = audit("overlap", *load, "--json")
    found = json.loads(output)
    # The second data set is the first half of the first one, backwards.
    assert code == 1 and [row["splits"] for row in found["between"]] == [
        ["train", "valid"], ["train", "test"], ["valid", "test"],
    ]  # fmt: skip
    assert [row["documents"] for row in found["between"]] == [10, 10, 0]
    first, second = restarted.blend[2], restarted.blend[4]
    assert found["between"][1]["examples"][0] == [f"{second} document 90", f"{first} document 9"]
    assert [row["documents"] - row["different"] for row in found["within"]] == [80, 0, 0]


def test_data_without_a_checkpoint(audit: Callable, programs: Programs, restarted: Restarted) -> None:
    vocabulary = programs.data_arguments[2:6]
    own = ("--train-data-path", restarted.blend[2], "--valid-data-path", restarted.blend[4])
    code, output, _ = audit("overlap", *own, *vocabulary)
    assert code == 1 and "validation in training: 100 of 100 documents" in output


@pytest.fixture
def place(restarted: Restarted, programs: Programs, tmp_path: Path) -> Path:
    """Copies of what the bad command lines use: ``ck``, ``vocab.json``, ``tiny.*``, ``metrics``."""
    shutil.copytree(restarted.checkpoints, tmp_path / "ck")
    words = json.loads((programs.folder / "vocab.json").read_text())
    swapped = dict(zip(words, [1, 0, *list(words.values())[2:]], strict=True))
    (tmp_path / "vocab.json").write_text(json.dumps(swapped))
    for end in ("bin", "idx"):
        shutil.copy(f"{restarted.blend[2]}.{end}", tmp_path / f"tiny.{end}")
    with open(tmp_path / "tiny.bin", "r+b") as file:
        file.write(b"\x01\x00")
    (tmp_path / "metrics").write_text("nonsense")
    return tmp_path


BAD = {
    "an iteration to come": ("batch --load {ck} --iteration 7", 2, "global_step6 has iterations 1 to 6"),
    "no such rank": ("batch --load {ck} --iteration 6 --rank 1", 2, "--rank 1: the run had ranks 0 to 0 then"),
    "another vocabulary": (
        "batch --load {ck} --iteration 1 --vocab-file {place}/vocab.json",
        2,
        "the vocabulary in {place}/vocab.json is not the vocabulary of {ck}/global_step6",
    ),
    "other data": (
        "batch --load {ck} --iteration 1 --data-path 0.7 {place}/tiny 0.3 {half}",
        3,
        "not the data that {ck}/global_step6 was trained on",
    ),
    "no metrics": ("proof --load {ck} --metrics-file {place}/none", 3, "none: cannot be read"),
    "nothing to look at": ("overlap", 2, "give --load with a checkpoint, or --data-path"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(audit: Callable, place: Path, restarted: Restarted, name: str) -> None:
    words, expected, message = (
        part.format(place=place, ck=place / "ck", half=restarted.blend[4]) if isinstance(part, str) else part
        for part in BAD[name]
    )
    code, output, error = audit(*words.split())
    assert (code, output) == (expected, "")
    lines = error.splitlines()
    assert len(lines) == 1 and message in lines[0]


def test_an_input_is_not_overwritten(audit: Callable, restarted: Restarted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_read", set())  # as if this process had read nothing yet
    index = next(restarted.checkpoints.parent.glob("*.idx"))
    before = index.read_bytes()
    code, _, error = audit("seen", "--load", restarted.checkpoints, "--output", index)
    assert code == 2 and f"--output {index} is an input of this command" in error
    assert index.read_bytes() == before
