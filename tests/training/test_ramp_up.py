"""A run whose batch grows: stopped in mid-ramp and resumed, also on other layouts, it equals an uninterrupted one."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from support.programs import read_metrics
from support.training import RankTraining

from megatron.checkpoint.tracker import newest
from megatron.tools.audit.proof import prove

SIZES = [4] * 5 + [8] * 3 + [12] * 3
SETTINGS = (
    "--train-samples 80 --rampup-batch-size 4 4 40 --global-batch-size 12 --eod-mask-loss"
    " --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 3"
)
LOGGED = ("consumed_samples", "global_batch_size", "learning_rate", "lm_loss", "grad_norm", "validation_loss")
ONE = "--batch-size 2"
DUALPIPEV = "--batch-size 1 --pipe-parallel-size 2 --pipeline-schedule dualpipev --zero-stage 1"
ZERO3 = "--batch-size 1 --zero-stage 3"


@pytest.fixture(scope="module")
def train(train_in_ranks: RankTraining) -> Callable[..., None]:
    """``train(processes, flags, *paths)``: the run of SETTINGS."""
    return lambda processes, flags, *paths: train_in_ranks(processes, *SETTINGS.split(), *flags.split(), *paths)


@pytest.fixture(scope="module")
def uninterrupted(train: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The metrics of one process, each with its iteration."""
    file = tmp_path_factory.mktemp("whole") / "metrics"
    train(1, ONE, "--metrics-file", file)
    return read_metrics(file)


def test_losses_and_sizes_of_a_ramp_up(uninterrupted: list[dict]) -> None:
    steps = [line for line in uninterrupted if "lm_loss" in line]
    assert [line["global_batch_size"] for line in steps] == SIZES
    assert [line["consumed_samples"] for line in steps] == [sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    for line, size in zip(steps, SIZES, strict=True):  # the schedule counts samples
        after, before = line["consumed_samples"], line["consumed_samples"] - size
        cosine = 1e-4 + 9e-4 * (1 + math.cos(math.pi * (before - 16) / (80 - 16))) / 2
        assert line["learning_rate"] == pytest.approx(1e-3 * after / 16 if after <= 16 else cosine)


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, ONE), (1, ONE)), ((2, DUALPIPEV), (2, ZERO3))],
    ids=["same", "dualpipev-zero3"],
)
def test_a_run_resumed_in_mid_ramp_equals_an_uninterrupted_one(
    train: Callable, uninterrupted: list[dict], tmp_path: Path, first: tuple[int, str], second: tuple[int, str]
) -> None:
    paths = ("--save", tmp_path / "ck", "--load", tmp_path / "ck", "--metrics-file", tmp_path / "metrics")
    train(*first, *paths, "--exit-interval", "6")
    train(*second, *paths)
    found = read_metrics(tmp_path / "metrics")
    rel = 0 if first == second else 1e-4
    for one, other in zip(uninterrupted, found, strict=True):
        names = [name for name in ("iteration", *LOGGED) if name in one]
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=rel)
    saved = newest(str(tmp_path / "ck"))
    proof = prove(saved.history, saved.skipped_samples, tmp_path / "metrics")
    assert (proof["faults"], proof["logged"], proof["samples"]) == ([], len(SIZES), sum(SIZES))
    parts = [(part.finished, part.last, part.global_batch_size) for part in saved.history]
    assert parts == [(0, 5, 4), (5, 6, 8), (6, 8, 8), (8, 11, 12)]
