"""Differences between what two runs computed."""

import math

import pytest
import torch

from megatron.verify.comparing import Differences, Result, compare

WEIGHT = torch.tensor([[1.0, -4.0], [2.0, 0.5]])


def result(losses=(2.0, 1.0), norms=(0.5, 0.25), **weights: list[torch.Tensor]) -> Result:
    return Result(losses, norms, {"0.weight": [WEIGHT], "1.weight": [WEIGHT]} | weights)


def test_equal_runs_do_not_differ() -> None:
    assert compare(result(), result(), 0.0) == Differences(0.0, 0.0, 0.0, None)


def test_differences_are_relative_and_the_largest() -> None:
    found = compare(result(), result(losses=(2.02, 1.001), norms=(0.5, 0.3), **{"1.weight": [WEIGHT + 0.04]}), 1e-3)
    assert (found.loss, found.grad_norm, found.weights) == pytest.approx((0.01, 0.2, 0.01), rel=1e-4)
    assert found.first_tensor == "1.weight"
    assert found.agree(0.21) and not found.agree(0.19)


def test_every_copy_counts() -> None:
    found = compare(result(), result(**{"0.weight": [WEIGHT, WEIGHT + 0.04]}), 1e-3)
    assert found.weights == pytest.approx(0.01, rel=1e-4) and found.first_tensor == "0.weight"


@pytest.mark.parametrize(
    "other",
    [
        result(losses=(math.nan, 1.0)),
        result(losses=(2.0,)),
        result(norms=(None, 0.25)),
        result(**{"0.weight": [WEIGHT * math.nan]}),
    ],
)
def test_what_is_no_number_never_agrees(other: Result) -> None:
    assert not compare(result(), other, 0.1).agree(1e30)


def test_a_step_that_both_skip_has_no_norm() -> None:
    assert compare(result(norms=(None, 0.25)), result(norms=(None, 0.25)), 0.0).agree(0.0)
