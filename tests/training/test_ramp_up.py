"""A run whose batch grows: stopped in mid-ramp and resumed, also on other layouts, it equals an uninterrupted one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.programs import read_metrics
from support.training import RankTraining

from megatron.checkpoint.tracker import newest
from megatron.config.batch_schedule import BatchSchedule
from megatron.tools.audit.proof import prove
from megatron.training.learning_rates import AnnealingLR

SIZES = [4] * 5 + [8] * 3 + [12] * 3
SETTINGS = (
    "--train-samples 80 --rampup-batch-size 4 4 40 --global-batch-size 12 --eod-mask-loss"
    " --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 --eval-interval 3"
)
LOGGED = ("consumed_samples", "global_batch_size", "learning_rate", "lm_loss", "grad_norm", "validation_loss")
ONE = "--batch-size 2"
STAGES = "--batch-size 1 --pipe-parallel-size 2"
DUALPIPEV = f"{STAGES} --pipeline-schedule dualpipev --zero-stage 1"
ZERO2 = "--batch-size 2 --zero-stage 2"
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
    assert [line["learning_rate"] for line in steps[:3]] == pytest.approx([1e-3 / 4, 2e-3 / 4, 3e-3 / 4])


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, ONE), (1, ONE)), ((2, DUALPIPEV), (2, ZERO2)), ((2, ZERO3), (2, STAGES))],
    ids=["same", "dualpipev-dp2", "zero3-pp2"],
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


def test_the_learning_rate_counts_samples() -> None:
    """With one batch size it is that of iterations; with several it follows the consumed samples."""
    settings = {"start_lr": 1.0, "decay_style": "linear", "last_iter": 0, "min_lr": 0.1}

    def rates(position: Callable[[int], int] | None, warmup: int, end: int, iterations: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
        schedule = AnnealingLR(optimizer, warmup_iter=warmup, total_iters=end, position=position, **settings)
        found = []
        for _ in range(iterations):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        return found

    constant = BatchSchedule(((0, 8),))
    assert rates(constant.consumed, 4 * 8, 10 * 8, 12) == pytest.approx(rates(None, 4, 10, 12))
    growing = BatchSchedule(((0, 4), (10, 8)))
    assert [growing.consumed(n) for n in range(6)] == [0, 4, 8, 12, 20, 28]
    decays = [1 - 0.9 * (samples - 6) / 24 for samples in (8, 12, 20, 28)]
    assert rates(growing.consumed, 6, 30, 7) == pytest.approx([4 / 6, 1.0, *decays, 0.1])
