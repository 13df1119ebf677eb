"""Losses and gradients that are not finite: skipped by all ranks, traced, counted, and rewound from."""

import itertools
import re

import pytest
from support.command_lines import CUDA, parse
from support.programs import read_metrics

from megatron.engines.status import HostCopy, StepStatus
from megatron.training.anomaly_detection import AnomalyDetector

SETTINGS = "--batch-size 2 --global-batch-size 8 --eval-iters 0 --clip-grad 0.4".split()


@pytest.mark.parametrize(
    "layout",
    [
        "--zero-stage 0",
        "--zero-stage 2 --offload-optimizer cpu",
        "--pipe-parallel-size 2 --zero-stage 1 --bf16",
        "--model-parallel-size 2 --zero-stage 2 --bf16",
        "--zero-stage 3 --bf16",
        "--zero-stage 1 --bf16 --fp8-format hybrid --fp8-min-size 16",
    ],
)
def test_a_bad_step_changes_no_weight(programs, tmp_path, layout: str) -> None:
    """A rank's loss is not a number in iteration 2: no weight of any rank changes, and training continues."""
    words = ("--train-iters", "3", *layout.split(), "--metrics-file", tmp_path / "metrics")
    rank = 0 if "model-parallel" in layout else 1  # the vocabulary is so small that the second part of it is padding
    finished = programs.faulty(2, f"gradient {rank} 2", *SETTINGS, *words).ok()
    assert "iteration 2: the" in finished.output and "is not finite, the step was skipped" in finished.output
    assert "a repeated forward pass is finite" in finished.output
    for rank, iteration in itertools.product((0, 1), (1, 2, 3)):
        match = re.search(rf"rank {rank} iteration {iteration} kept (\d+) of (\d+) weights", finished.output)
        kept, held = map(int, match.groups())
        # What an update adds to a norm's weight of 1 may be less than the precision of bf16.
        assert kept == held > 10 if iteration == 2 else kept < held / 2
    first, second, third = read_metrics(tmp_path / "metrics")
    assert second["grad_norm"] is None and second["skipped_iterations"] == third["skipped_iterations"] == 1
    assert first["grad_norm"] > 0 and third["grad_norm"] > 0 and third["lm_loss"] > 0


@pytest.mark.parametrize("layout", ["--pipe-parallel-size 2", "--zero-stage 0"])
def test_consecutive_bad_steps_end_the_run_with_their_origin(programs, tmp_path, layout: str) -> None:
    places = ("--save", tmp_path / "ck", "--save-interval", "2")
    words = ("--train-iters", "9", "--max-consecutive-bad-steps", "3", *layout.split())
    finished = programs.faulty(2, "weights 1 3 3", *SETTINGS, *words, *places)
    assert finished.returncode == 5
    problem = "iteration 3: the loss is not finite, the step was skipped"
    assert f"{problem}; in a repeated forward pass it begins in layer 3 on rank 1\n" in finished.output
    assert "no checkpoint saved after iteration 4" in finished.output
    (line,) = (line for line in finished.output.splitlines() if "error:" in line)
    assert "iteration 5" in line and "--max-consecutive-bad-steps 3" in line and "--rewind-on-spike" in line
    assert (tmp_path / "ck" / "latest").read_text() == "global_step2"


def test_a_run_that_cannot_save_its_last_step_has_failed(programs, tmp_path) -> None:
    words = ("--train-iters", "3", "--save", tmp_path / "ck", "--save-interval", "2")
    finished = programs.faulty(1, "gradient 0 3", *SETTINGS, *words)
    assert finished.returncode == 5
    assert "error: iteration 3: the last step was bad, so no checkpoint was saved" in finished.output.splitlines()[-1]
    assert (tmp_path / "ck" / "latest").read_text() == "global_step2"


def test_rewinding_restores_a_corrupted_weight(programs, tmp_path) -> None:
    words = "--train-iters 8 --max-consecutive-bad-steps 2 --rewind-on-spike --save-interval 2".split()
    finished = programs.faulty(
        1, "weights 0 2 4", *SETTINGS, *words, "--save", tmp_path / "ck", "--metrics-file", tmp_path / "metrics"
    ).ok()
    assert f"rewinding to {tmp_path / 'ck' / 'global_step2'}, skipping samples 24 to 39" in finished.output
    lines = read_metrics(tmp_path / "metrics")
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    other = programs.faulty(1, "weights 0 2 1", *SETTINGS, *words, "--save", tmp_path / "ck")  # not from those
    assert other.returncode == 5 and "rewinding to" not in other.output


def test_rewinding_has_a_limit(programs, tmp_path) -> None:
    words = "--train-iters 8 --rewind-on-spike --save-interval 2 --max-consecutive-bad-steps 2".split()
    finished = programs.faulty(1, "samples 24 9999 nan", *SETTINGS, *words, "--save", tmp_path / "ck")
    assert finished.returncode == 5 and finished.output.count("rewinding to") == 2
    assert "iteration 5 is bad again after rewinding 2 times to" in finished.output


@pytest.mark.parametrize("flags", ["", "--zero-stage 1 --bf16 --fp8-format hybrid --fp8-min-size 16"])
def test_samples_of_a_spike_are_skipped_for_good(programs, tmp_path, flags: str) -> None:
    """Rewinding after a spike gives what a stream without these samples gives, also after a resume."""
    words = f"--train-iters 26 --rewind-on-spike --save-interval 8 {flags}".split()
    fault = "samples 168 171 50"
    whole = ("--save", tmp_path / "ck", "--metrics-file", tmp_path / "metrics")
    finished = programs.faulty(1, fault, *SETTINGS, *words, *whole).ok()
    assert "iteration 22: the loss of" in finished.output and "is a spike over" in finished.output
    assert f"rewinding to {tmp_path / 'ck' / 'global_step16'}, skipping samples 168 to 175" in finished.output
    losses = [(line["iteration"], line["lm_loss"]) for line in read_metrics(tmp_path / "metrics")]
    assert [iteration for iteration, _ in losses] == [*range(1, 23), *range(17, 27)]
    assert losses[16:21] == losses[22:27] and losses[27][1] < losses[21][1] / 10
    for place in ("latest", "latest_checkpointed_iteration.txt"):
        (tmp_path / "ck" / place).write_text({"latest": "global_step24"}.get(place, "24"))
    resumed = ("--load", tmp_path / "ck", "--metrics-file", tmp_path / "resumed", *words[:2], *flags.split())
    programs.faulty(1, fault, *SETTINGS, *resumed).ok()
    assert [(line["iteration"], line["lm_loss"]) for line in read_metrics(tmp_path / "resumed")] == losses[-2:]


def results(run, *steps: tuple[float, bool, float]) -> list[str]:
    detector = AnomalyDetector(run)
    found = []
    for number, (loss, applied, scale) in enumerate(steps, start=1):
        outcome = HostCopy({"skipped": not applied, "loss_scale": scale})
        result = detector.check(number, loss, StepStatus(outcome, 1e-3, 1.0, 0))
        found.append(
            "stop" if result.limit_reached else "spike" if result.is_spike else result.problem and "bad" or "good"
        )
    return found


def test_fp16_overflow_counts_at_the_minimum_scale() -> None:
    run = parse("--fp16 --min-scale 4 --max-consecutive-bad-steps 2", environ=CUDA)
    steps = [(2.0, False, 16.0), (2.0, False, 8.0), (2.0, False, 4.0), (2.0, True, 4.0), (2.0, False, 4.0)]
    assert results(run, *steps, (2.0, False, 4.0)) == ["good", "good", "bad", "good", "bad", "stop"]


def test_spike_is_relative_to_previous_steps() -> None:
    """To as many as make a mean that is certain."""
    run = parse("--rewind-on-spike --spike-factor 1.5 --save ck --save-interval 5")
    steps = [(loss, True, 1.0) for loss in (*range(1, 20), 110.0, 21.0, 25.0, 3.0)]
    assert results(run, *steps) == ["good"] * 21 + ["spike", "good"]
    assert results(parse(), *steps) == ["good"] * 23
