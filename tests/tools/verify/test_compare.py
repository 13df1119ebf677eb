"""Differences between what two runs computed."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.tools.verify import results
from megatron.tools.verify.compare import Bounds, Differences, Result, compare, rounding_effects
from megatron.tools.verify.request import ONE_PROCESS
from megatron.tools.verify.runs import cause_in

WEIGHT = torch.tensor([[1.0, -4.0], [2.0, 0.5]])
GRADIENT = torch.tensor([[0.5, -2.0], [1.0, 1e-6]])
"""Clear but for its last element, which is rounding."""
NAMES = ("0.weight", "1.weight")
BOUNDS = Bounds.of("fp32")


def result(losses=(2.0, 1.0), norms=(0.5, 0.25), gradients=None, first_weights=None, weights=None) -> Result:
    """Two iterations at a learning rate of 0.1 each; of each mapping what is not as in the reference."""
    return Result(
        losses,
        norms,
        (0.1, 0.1),
        gradients={name: [GRADIENT] for name in NAMES} | (gradients or {}),
        first_weights={name: [WEIGHT] for name in NAMES} | (first_weights or {}),
        weights={name: [WEIGHT] for name in NAMES} | (weights or {}),
        first_step=next((n for n, norm in enumerate(norms) if norm is not None), 0),
    )


def found(**changes) -> Differences:
    return compare(result(), result(**changes), BOUNDS)


def moved(clear: float = 0.0, rounding: float = 0.0) -> torch.Tensor:
    """The weight with a clear element, and the one whose gradient is rounding, elsewhere."""
    return WEIGHT + torch.tensor([[clear, 0.0], [0.0, rounding]])


def test_equal_runs_do_not_differ() -> None:
    assert found() == Differences(0.0, 0.0, 0.0, 0.0, 0.0, None)


def test_the_largest_differences_are_reported() -> None:
    differences = found(
        losses=(2.02, 1.001),
        norms=(0.5, 0.3),
        gradients={"1.weight": [GRADIENT + 0.02]},
        weights={"0.weight": [moved(clear=0.02)], "1.weight": [moved(rounding=0.3)]},
    )
    assert (differences.loss, differences.grad_norm, differences.gradient) == pytest.approx((0.01, 0.2, 0.01), rel=1e-4)
    assert (differences.weights, differences.other_weights) == pytest.approx((0.1, 1.5), rel=1e-4)
    assert not differences.agree


def test_a_step_of_rounding_is_no_difference() -> None:
    """Both runs may move such an element by the learning rate in each iteration, in opposite directions."""
    assert found(weights={"0.weight": [moved(rounding=0.39)]}).agree
    assert not found(weights={"0.weight": [moved(rounding=0.41)]}).agree
    assert not found(weights={"0.weight": [moved(clear=0.01)]}).agree


@pytest.mark.parametrize(
    "changes, first",
    [
        ({"first_weights": {"1.weight": [WEIGHT + 1]}, "losses": (3.0, 3.0)}, "initial 1.weight"),
        ({"losses": (3.0, 1.0), "gradients": {"0.weight": [GRADIENT + 1]}}, "loss of iteration 1"),
        (
            {"gradients": {name: [2 * GRADIENT] for name in NAMES}, "norms": (1.0, 0.5)},
            "gradient of 1.weight (2 times the reference)",
        ),
        ({"gradients": {"0.weight": [GRADIENT, GRADIENT + 1]}}, "gradient of 0.weight"),
        ({"norms": (0.6, 0.25), "first_weights": {"0.weight": [moved(0.05)]}}, "gradient norm of iteration 1"),
        ({"first_weights": {"0.weight": [moved(0.05)]}, "losses": (2.0, 1.1)}, "0.weight after the first step"),
        ({"losses": (2.0, 1.1), "norms": (0.5, 0.3)}, "loss of iteration 2"),
        ({"weights": {"0.weight": [WEIGHT, moved(clear=0.05)]}}, "final 0.weight"),
    ],
)
def test_the_first_difference_is_named_in_the_order_of_training(changes: dict, first: str) -> None:
    """The backward pass reaches the last layer first."""
    differences = found(**changes)
    assert differences.first == first
    assert not differences.agree


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": (math.nan, 1.0)},
        {"losses": (2.0,)},
        {"norms": (0.5, None)},
        {"gradients": {"0.weight": [GRADIENT * math.nan]}},
        {"gradients": {"0.weight": []}},
        {"weights": {"0.weight": [WEIGHT[:1]]}},
    ],
)
def test_nan_and_what_is_missing_never_agree(changes: dict) -> None:
    assert not found(**changes).agree


def test_rounding_that_is_amplified_raises_the_bounds_after_the_first_step_only() -> None:
    """Up to ten times what was measured in an iteration or before it, if gradients differ as much."""
    slightly = {"gradients": {"1.weight": [GRADIENT + 2e-6]}}
    again = result(losses=(2.0, 1.001), norms=(0.5, 0.2501), weights={"0.weight": [moved(clear=0.01)]}, **slightly)
    rounding = rounding_effects(result(), [again, result(**slightly)], BOUNDS)

    def first_with(**changes) -> str | None:
        return compare(result(), result(**slightly, **changes), BOUNDS, rounding).first

    assert first_with(losses=(2.0, 1.009), norms=(0.5, 0.2509), weights={"1.weight": [moved(clear=0.09)]}) is None
    assert first_with(losses=(2.0, 1.011)) == "loss of iteration 2"
    assert first_with(weights={"1.weight": [moved(clear=0.11)]}) == "final 1.weight"
    assert first_with(losses=(2.002, 1.0)) == "loss of iteration 1"
    assert first_with(norms=(0.501, 0.25)) == "gradient norm of iteration 1"
    assert first_with(losses=(2.0, math.nan)) == "loss of iteration 2"
    assert found(losses=(2.0, 1.1)).may_be_rounding and not found(losses=(2.1, 1.1)).may_be_rounding


def test_a_small_gradient_of_nothing_but_rounding_is_compared_with_how_much_rounding_there_is() -> None:
    """Its elements are not clear either; other gradients keep their bound."""
    bf16, noise = Bounds.of("bf16"), torch.tensor([[6e-3, -2e-3], [-4e-3, 1e-3]])

    def of(factor: float, steps: float = 0.0, **others) -> Result:
        weights = {"1.weight": [WEIGHT + steps * torch.sign(noise)]}
        gradients = {"1.weight": [factor * noise], **others}
        return result(gradients=gradients, first_weights=weights, weights=weights)

    rounding = rounding_effects(of(1), [of(-0.5), of(0.2)], bf16)
    assert rounding.noise == pytest.approx({"1.weight": 1.5 * 6e-3})

    def differences(other: Result, known: Differences = rounding) -> Differences:
        return compare(of(1), other, bf16, known)

    without = compare(of(1), of(-1, steps=0.15), bf16)
    assert (without.first, without.may_be_rounding) == ("gradient of 1.weight (-1 times the reference)", True)
    assert differences(of(-1, steps=0.15)).agree
    assert differences(of(17)).first == "gradient of 1.weight (17 times the reference)"
    of_another = differences(of(1, **{"0.weight": [1.2 * GRADIENT]}))
    assert (of_another.kind, of_another.may_be_rounding) == ("gradient", False)
    assert not differences(of(-1, steps=0.25)).agree
    assert not rounding_effects(of(1), [of(0.8)], bf16).noise
    assert not rounding_effects(result(), [result(gradients={"0.weight": [-GRADIENT]})], bf16).noise


@pytest.mark.parametrize("loss, runs", [(1.00005, 0), (1.09, 2), (1.5, 3)])
def test_the_reference_runs_again_until_a_difference_is_rounding(
    loss: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first run that happens to differ by little decides nothing; three do."""
    calls = []

    class Again:
        def __init__(self, *_: object) -> None:
            pass

        def train(self, layout: object, iterations: int, prepare: tuple) -> tuple[Result, None]:
            calls.append(prepare)
            return result(losses=(2.0, (1.0001, 1.01, 1.002)[prepare[2]])), None

    monkeypatch.setattr(results, "Trainer", Again)
    request = SimpleNamespace(first=ONE_PROCESS, run=lambda _: SimpleNamespace(precision=SimpleNamespace(dtype="fp32")))
    comparison = results.Comparison(request, BOUNDS, 1)
    for _ in range(2):  # what has run is kept
        differences = comparison.compare(ONE_PROCESS, result(), result(losses=(2.0, loss)))
        assert (differences.agree, differences.is_rounding, len(calls)) == (runs < 3, runs == 2, runs)


def test_the_last_digit_of_a_weight_is_no_part_of_a_small_step() -> None:
    """A norm's weight of 1 and a learning rate of 1e-6: the next number in fp32 is a tenth of it away."""
    one = torch.ones(2)
    runs = [
        Result((2.0,), (0.5,), (1e-6,), {"norm": [one]}, {"norm": [weight]}, {"norm": [weight]})
        for weight in (one - 1e-6, torch.nextafter(one - 1e-6, one), one - 0.5e-6)
    ]
    assert compare(runs[0], runs[1], BOUNDS).agree
    assert compare(runs[0], runs[2], BOUNDS).first == "norm after the first step"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "> layout\nx.py: error: NaN\nx.py: error: rank 0 was killed\n[W1127 TCPStore.cpp:125] lost\n"
            + "frame\n" * 20,
            "x.py: error: NaN",
        ),
        ("a\nb\n", "a\n    b"),
        ("", ""),
    ],
)
def test_the_cause_of_a_failed_run_is_its_error(tmp_path: Path, log: str, cause: str) -> None:
    (tmp_path / "log").write_text(log)
    assert cause_in(tmp_path / "log").strip() == cause
