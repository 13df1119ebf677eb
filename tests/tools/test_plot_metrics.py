"""tools/plot_metrics.py: pictures of metrics files; a bad line is named with its number."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest


def write_metrics(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def step(iteration: int, loss: float | None) -> dict:
    others = {"learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_second": 2e4}
    return {"iteration": iteration, "lm_loss": loss, **others}


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    """A run that was resumed at iteration 20, so that iteration 30 is there twice."""
    records = [step(10, 6.0), step(20, 5.0), step(30, 9.0), step(30, 4.5), step(40, float("nan")), step(50, None)]
    return write_metrics(tmp_path / "run.jsonl", [*records, {"iteration": 20, "validation_loss": 5.25}])


def test_two_runs_and_a_baseline_in_one_vector_picture(tool: Callable, metrics: Path, tmp_path: Path):
    other = write_metrics(tmp_path / "other.jsonl", [step(10, 7.0)])
    output = tmp_path / "pictures" / "loss.svg"
    flags = ("--output", output, "--baseline", "unigram entropy=6.41", "$_{x$=7.6", "--title", "Two $runs$")
    result = tool("plot_metrics", metrics, other, *flags)
    assert result.returncode == 0, result.stderr
    assert "run lm_loss 4.5000 at iteration 30, run validation_loss 5.2500 at iteration 20" in result.stdout
    assert "other lm_loss 7.0000 at iteration 10" in result.stdout
    # matplotlib draws text as shapes, and writes it into a comment.
    picture = output.read_text(encoding="utf-8")
    for text in ("Two $runs$", "run: training", "other: training", "unigram entropy, 6.410", "$_{x$, 7.600"):
        assert f"<!-- {text} -->" in picture
    assert "run: validation, 5.250 at the end (perplexity 190.6)" in picture
    assert "other: validation" not in picture
    assert [path.name for path in output.parent.iterdir()] == ["loss.svg"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"iteration": 1, "lm_loss": 2}\n{"iteration": 2, "lm\n', "run.jsonl:2: not JSON"),
        (b'{"iteration": 1, "lm_loss": 1e308}', "run.jsonl: no lm_loss and no validation_loss to draw"),
        (
            b'{"iteration": 1%s, "lm_loss": 1}' % (b"0" * 400),
            "run.jsonl:1: not a JSON object with an integer iteration",
        ),
        (b"", "run.jsonl: no lm_loss and no validation_loss to draw"),
    ],
)
def test_a_bad_file_is_one_line(tool: Callable, tmp_path: Path, content: bytes, expected: str):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    result = tool("plot_metrics", path, "--output", tmp_path / "loss.png")
    assert (result.returncode, len(result.stderr.splitlines())) == (3, 1)
    assert expected in result.stderr
    assert not (tmp_path / "loss.png").exists()


def test_nothing_is_written_into_a_checkpoint(tool: Callable, metrics: Path, tmp_path: Path):
    (tmp_path / "manifest.json").touch()
    before = {*tmp_path.iterdir()}
    result = tool("plot_metrics", metrics, "--output", tmp_path / "loss.svg")
    assert result.returncode == 2 and "is a checkpoint, and is refused with other files in it" in result.stderr
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("loss", ["nan", "x", "-1e308"])
def test_a_baseline_that_cannot_be_drawn_is_refused(tool: Callable, metrics: Path, tmp_path: Path, loss: str):
    result = tool("plot_metrics", metrics, "--output", tmp_path / "loss.png", "--baseline", f"a={loss}")
    assert result.returncode == 2 and f"--baseline a={loss}: " in result.stderr
