"""Optimizers beside Adam: they learn, compute the same on every layout, and resume on another one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.programs import read_metrics
from support.training import RankTraining
from torch import nn

from megatron.checkpoint.tracker import publish
from megatron.training.optimizers.muon import Matrix, Muon

SAVED = 3
SETTINGS = (
    "--train-iters 6 --batch-size 4 --global-batch-size 8 --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
    " --warmup 0 --clip-grad 0.4"
).split()
MUON = "--optimizer muon --lr 1e-2 --muon-extra-scale-factor 0.2"
SWIGLU = "--swiglu --group-query-attention --num-query-groups 2"
FLAGS = {
    "sgd": "--optimizer sgd --lr 0.5",
    "lion": "--optimizer lion --lr 3e-3 --adam-beta2 0.99",
    "adafactor": "--optimizer adafactor --lr 0.3",
    "muon": f"{MUON} {SWIGLU}",
    "muon-whole-qkv": f"{MUON} --muon-no-split-qkv --muon-scale-mode shape_scaling --muon-coefficient-type simple",
}


@pytest.fixture(scope="module")
def one_process(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``one_process(optimizer)``: the metrics of a run on one process, and its checkpoint of iteration 3."""
    folders: dict[str, Path] = {}

    def folder(optimizer: str) -> Path:
        if optimizer not in folders:
            folders[optimizer] = tmp_path_factory.mktemp(optimizer)
            words = (*SETTINGS, *FLAGS[optimizer].split(), "--save-interval", SAVED)
            train_in_ranks.into_folder(folders[optimizer], 1, *words)
            publish(folders[optimizer] / "checkpoint", f"global_step{SAVED}", SAVED)
        return folders[optimizer]

    return folder


@pytest.fixture
def losses(train_in_ranks: RankTraining, tmp_path: Path) -> Callable[..., list[float]]:
    """The losses of a run with these flags."""

    def run(processes: int, flags: str, *words: str | Path) -> list[float]:
        train_in_ranks(processes, *SETTINGS, *flags.split(), *words, "--metrics-file", tmp_path / "metrics")
        return [line["lm_loss"] for line in read_metrics(tmp_path / "metrics")]

    return run


LAYOUTS = [
    ("sgd", 2, "--model-parallel-size 2 --zero-stage 1"),
    ("lion", 2, "--pipe-parallel-size 2 --zero-stage 1"),
    ("adafactor", 2, "--pipe-parallel-size 2"),
    ("muon", 2, "--model-parallel-size 2"),
    ("muon", 2, "--zero-stage 2"),
    ("muon-whole-qkv", 2, "--pipe-parallel-size 2 --zero-stage 1"),
]


@pytest.mark.parametrize(("optimizer", "processes", "layout"), LAYOUTS)
def test_a_layout_has_the_losses_of_one_process(losses, one_process, optimizer, processes, layout):
    expected = [line["lm_loss"] for line in read_metrics(one_process(optimizer) / "metrics")]
    assert expected[-1] < expected[0] - 0.1
    assert losses(processes, f"{FLAGS[optimizer]} {layout}") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "processes", "layout"),
    [
        ("sgd", 2, "--zero-stage 3"),
        ("lion", 1, "--zero-stage 1"),
        ("muon", 2, "--model-parallel-size 2 --zero-stage 1"),
        ("muon", 1, ""),
    ],
)
def test_a_run_resumes_on_another_layout(losses, one_process, optimizer, processes, layout):
    source = one_process(optimizer)
    expected = [line["lm_loss"] for line in read_metrics(source / "metrics")][SAVED:]
    found = losses(processes, f"{FLAGS[optimizer]} {layout}", "--load", source / "checkpoint")
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_a_step_of_muon_is_that_of_torch(shape, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch iterates in bf16
    torch.manual_seed(0)
    theirs = nn.Parameter(torch.randn(shape))
    ours = nn.Parameter(theirs.detach().clone())
    settings = {"lr": 0.02, "weight_decay": 0.1}
    groups = [{"params": [ours], "orthogonalize": True}]
    muon = Muon(groups, [Matrix(ours)], **settings, coefficients="simple", scale_mode="shape_scaling")
    reference = torch.optim.Muon([theirs], **settings)
    for _ in range(3):
        theirs.grad = torch.randn(shape)
        ours.grad = theirs.grad.clone()
        reference.step()
        muon.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
