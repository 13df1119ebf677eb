"""Differences between what two runs computed."""

import math

import pytest
import torch

from megatron.tools.verify.comparing import Differences, Result, Tolerances, compare


def all_of(bound: float) -> Tolerances:
    return Tolerances(bound, bound, bound)


WEIGHT = torch.tensor([[1.0, -4.0], [2.0, 0.5]])


def result(losses=(2.0, 1.0), norms=(0.5, 0.25), **weights: list[torch.Tensor]) -> Result:
    return Result(losses, norms, {"0.weight": [WEIGHT], "1.weight": [WEIGHT]} | weights)


def test_equal_runs_do_not_differ() -> None:
    assert compare(result(), result(), all_of(0.0)) == Differences(0.0, 0.0, 0.0, None)


def test_differences_are_relative_and_the_largest() -> None:
    found = compare(
        result(), result(losses=(2.02, 1.001), norms=(0.5, 0.3), **{"1.weight": [WEIGHT + 0.04]}), all_of(1e-3)
    )
    assert (found.loss, found.grad_norm, found.weights) == pytest.approx((0.01, 0.2, 0.01), rel=1e-4)
    assert found.first_tensor == "1.weight"
    assert found.agree(all_of(0.21)) and not found.agree(all_of(0.19))
    assert found.agree(Tolerances(0.02, 0.3, 0.02)) and not found.agree(Tolerances(0.02, 0.3, 0.001))


def test_every_copy_counts() -> None:
    found = compare(result(), result(**{"0.weight": [WEIGHT, WEIGHT + 0.04]}), all_of(1e-3))
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
    assert not compare(result(), other, all_of(0.1)).agree(all_of(math.inf))


def test_a_step_that_both_skip_has_no_norm() -> None:
    assert compare(result(norms=(None, 0.25)), result(norms=(None, 0.25)), all_of(0.0)).agree(all_of(0.0))
