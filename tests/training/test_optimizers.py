"""Optimizers beside Adam: they learn, compute the same on every layout, and resume on another one."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from support.programs import TINY_MODEL, read_metrics
from support.training import RankTraining, pretrain
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from megatron.checkpoint.commit import publish
from megatron.engines.optimizers import Lion
from megatron.engines.optimizers.muon import Matrix, Muon
from megatron.engines.optimizers.skipping import scale_and_skip, takes_scale
from megatron.engines.state import accept_any_adam, moment_names

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
    "adagrad": "--lr 3e-2 --weight-decay 0.1 --deepspeed_config {place}/adagrad.json",
    "muon": f"{MUON} {SWIGLU}",
    "muon-whole-qkv": f"{MUON} --muon-no-split-qkv --muon-scale-mode shape_scaling --muon-coefficient-type simple",
}


ONE = (1, "")
"""Processes and layout."""


@pytest.fixture(scope="module")
def trained(train_in_ranks: RankTraining, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``trained(optimizer, processes, layout)``: the metrics of a run, and its checkpoint of iteration 3."""

    @cache
    def folder(optimizer: str, processes: int = 1, layout: str = "") -> Path:
        place = tmp_path_factory.mktemp(optimizer)
        (place / "adagrad.json").write_text('{"optimizer": {"type": "Adagrad"}}')
        words = (*SETTINGS, *FLAGS[optimizer].format(place=place).split(), *layout.split(), "--save-interval", SAVED)
        train_in_ranks.into_folder(place, processes, *words)
        publish(place / "checkpoint", f"global_step{SAVED}", SAVED)
        return place

    return folder


def losses(metrics: Path) -> list[float]:
    return [line["lm_loss"] for line in read_metrics(metrics)]


@pytest.mark.parametrize(
    ("optimizer", "processes", "layout"),
    [
        ("sgd", 2, "--model-parallel-size 2 --zero-stage 1"),
        ("lion", 2, "--pipe-parallel-size 2 --zero-stage 1"),
        ("lion", 1, "--zero-stage 2 --offload-optimizer cpu"),
        ("adafactor", 2, "--pipe-parallel-size 2"),
        ("adagrad", 2, "--zero-stage 1"),
        ("adagrad", 1, "--zero-stage 3"),
        ("muon", 2, "--model-parallel-size 2"),
        ("muon", 2, "--zero-stage 2"),
        ("muon-whole-qkv", 2, "--pipe-parallel-size 2 --zero-stage 1"),
    ],
)
def test_a_layout_has_the_losses_of_one_process(trained, optimizer, processes, layout):
    expected = losses(trained(optimizer) / "metrics")
    assert expected[-1] < expected[0] - 0.1
    assert losses(trained(optimizer, processes, layout) / "metrics") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "before", "processes", "layout"),
    [
        ("sgd", ONE, 2, "--zero-stage 3"),
        ("adagrad", ONE, 2, "--zero-stage 2"),
        ("adagrad", (2, "--zero-stage 1"), 1, "--zero-stage 3"),
        ("muon", ONE, 2, "--model-parallel-size 2 --zero-stage 1"),
        ("muon", (2, "--model-parallel-size 2"), 1, ""),
    ],
)
def test_a_run_resumes_on_another_layout(train_in_ranks, trained, tmp_path, optimizer, before, processes, layout):
    source, metrics = trained(optimizer, *before), tmp_path / "metrics"
    words = [
        *SETTINGS,
        *FLAGS[optimizer].format(place=source).split(),
        *layout.split(),
        "--load",
        source / "checkpoint",
    ]
    train_in_ranks(processes, *words, "--metrics-file", metrics)
    assert losses(metrics) == pytest.approx(losses(source / "metrics")[SAVED:], rel=1e-5)


@pytest.mark.parametrize(
    ("processes", "layout"), [(1, ""), (2, "--model-parallel-size 2"), (2, "--zero-stage 2"), (2, "--zero-stage 3")]
)
def test_adagrad_accumulates_the_squares_of_all_gradients(run_ranks_once, programs, tmp_path, processes, layout):
    """Beside the same steps in fp64, with a large learning rate."""
    (file := tmp_path / "adagrad.json").write_text('{"optimizer": {"type": "Adagrad"}}')
    words = [*TINY_MODEL, *programs.data_arguments, *SETTINGS, *layout.split(), "--deepspeed_config", file]
    words += ["--lr", "0.1", "--weight-decay", "0.1"]
    for steps, difference in run_ranks_once(processes, difference_from_fp64, list(map(str, words))):
        assert steps >= 6 and difference < 1e-5


def difference_from_fp64(words: list[str]) -> tuple[int, float]:
    """Steps of a run with Adagrad, and the largest difference of a weight of this rank after the last one."""
    step, exact, steps = Adagrad.step, {}, 0

    def step_in_both(optimizer: Adagrad, closure: None = None) -> None:
        nonlocal steps
        steps += 1
        for group in optimizer.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                value, total = exact.get(weight, (weight.detach().double(), 0.0))
                gradient = weight.grad.double() / getattr(optimizer, "grad_scale", 1.0) + group["weight_decay"] * value
                total = total + gradient**2
                exact[weight] = value - group["lr"] * gradient / (total.sqrt() + group["eps"]), total
        step(optimizer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adagrad, "step", step_in_both)
        code, output = pretrain(words)
    assert code == 0, output
    return steps, max(float((weight.detach() - value).abs().max()) for weight, (value, _) in exact.items())


def test_adagrad_loads_the_single_group_of_earlier_versions():
    weights = [nn.Parameter(torch.ones(length)) for length in (2, 3)]
    earlier, now = Adagrad(weights, lr=0.1), Adagrad([{"params": [weight]} for weight in weights])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    earlier.step()
    accept_any_adam(now)
    now.load_state_dict(earlier.state_dict())
    assert [group["params"] for group in now.param_groups] == [[weight] for weight in weights]
    torch.testing.assert_close([now.state[weight]["sum"] for weight in weights], [torch.ones(2), torch.ones(3)])


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


STEPS = {
    "adam": lambda groups: AdamW(groups, fused=True),
    "adagrad": lambda groups: Adagrad(groups, fused=True),
    "lion": Lion,
    "sgd": lambda groups: SGD(groups, momentum=0.9, fused=True),
    "muon": lambda groups: Muon(
        [{**groups[0], "orthogonalize": True}, groups[1]], [Matrix(*groups[0]["params"])], lr=0.1
    ),
}


@pytest.mark.parametrize(
    "make", [*STEPS.values(), torch.optim.Adafactor, lambda groups: SGD(groups, lr=0.1)], ids=lambda make: make.__name__
)
def test_the_moments_of_a_parameter_are_known(make: Callable[..., torch.optim.Optimizer]) -> None:
    weights = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
    optimizer = make([{"params": [weight]} for weight in weights])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight in weights:
        kept = {name for name, value in optimizer.state[weight].items() if value is not None}
        assert kept - {"step"} == moment_names(optimizer, weight)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_scaled_or_skipped_on_the_device(name: str) -> None:
    """Also the first one, in which the state is made."""
    weights, others = ([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))] for _ in range(2))
    skipping, never = (STEPS[name]([{"params": [x]} for x in of]) for of in (weights, others))
    assert takes_scale(skipping)
    for number, norm in enumerate([torch.nan, 1.0, 1.0, torch.inf, 1.0]):
        torch.manual_seed(number)
        before = [weight.detach().clone() for weight in weights]
        gradients = [torch.randn_like(weight) for weight in weights]
        for weight, other, gradient in zip(weights, others, gradients, strict=True):
            weight.grad, other.grad = gradient * 4 * norm, gradient
        scale_and_skip(skipping, torch.tensor(norm), torch.tensor(4.0))
        skipping.step()
        if norm == 1.0:
            never.step()
        else:
            torch.testing.assert_close(weights, before, rtol=0, atol=0)
        torch.testing.assert_close(weights, others, rtol=1e-6, atol=1e-7)
