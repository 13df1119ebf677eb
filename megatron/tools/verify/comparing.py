"""Losses, gradient norms and weights of two runs beside each other."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from megatron.checkpoint.parameter_state import whole_weights
from megatron.checkpoint.tracker import newest
from megatron.parallel.layout import ParallelLayout
from megatron.tools.verify.request import checkpoint_folder, metrics_file


@dataclass(frozen=True)
class Result:
    """What a run computed."""

    losses: Sequence[float | None]
    grad_norms: Sequence[float | None]
    weights: Mapping[str, list[Tensor]]
    """By name, in the order of layers; a copy from each tensor-parallel rank where each has the whole."""


class Tolerances(NamedTuple):
    """The largest relative differences that count as equal."""

    loss: float
    grad_norm: float
    weights: float

    @classmethod
    def of(cls, dtype: str) -> "Tolerances":
        """What rounding alone explains in fp32, bf16 or fp16, with a margin of some ten times.

        In half precision no bound on weights means anything: Adam makes a step of full size of the smallest
        gradient, whose sign is then a matter of rounding.
        """
        return cls(1e-4, 1e-4, 1e-4) if dtype == "fp32" else cls(1e-3, 1e-2, math.inf)


@dataclass(frozen=True)
class Differences:
    """How far a run is from another, relative to the other."""

    loss: float
    grad_norm: float
    weights: float
    first_tensor: str | None
    """Name of the first weight, in the order of layers, that is further off than the tolerance."""

    def agree(self, tolerances: Tolerances) -> bool:
        """Whether nothing is further off than that. What is no number never agrees."""
        found = (self.loss, self.grad_norm, self.weights)
        return all(math.isfinite(a) and a <= bound for a, bound in zip(found, tolerances, strict=True))


def read_result(folder: Path, layout: ParallelLayout) -> Result:
    """What the run left in ``folder``. Raises CheckpointError where the checkpoint is not whole."""
    lines = [json.loads(line) for line in metrics_file(folder).read_text(encoding="utf-8").splitlines()]
    saved = newest(checkpoint_folder(folder))
    config = saved.whole_model_config()
    heads = config.num_attention_heads
    weights = {
        name: [_with_effect(name, copy.float(), heads) for copy in copies]
        for name, copies in whole_weights(config, saved)
    }
    return Result([line["lm_loss"] for line in lines], [line["grad_norm"] for line in lines], weights)


def _with_effect(name: str, weight: Tensor, heads: int) -> Tensor:
    """``weight`` without the bias of keys [heads, 3, head size], which adds the same to all scores of a query.

    The softmax takes it out again. Its gradient is nothing but rounding, which Adam blows up to whole steps.
    """
    return weight.view(heads, 3, -1)[:, ::2] if name.endswith("query_key_value.bias") else weight


def compare(reference: Result, other: Result, tolerances: Tolerances) -> Differences:
    """``other`` beside ``reference``."""
    weights = {name: _of_weight(copies[0], other.weights[name]) for name, copies in reference.weights.items()}
    return Differences(
        loss=_of_series(reference.losses, other.losses),
        grad_norm=_of_series(reference.grad_norms, other.grad_norms),
        weights=_largest(weights.values()),
        first_tensor=next((name for name, difference in weights.items() if not difference <= tolerances.weights), None),
    )


def _of_series(reference: Sequence[float | None], other: Sequence[float | None]) -> float:
    if len(reference) != len(other):
        return math.inf
    return _largest(_of_number(a, b) for a, b in zip(reference, other, strict=True))


def _of_number(reference: float | None, other: float | None) -> float:
    if reference is None or other is None:  # a step that fp16 skipped has no gradient norm
        return 0.0 if reference is other else math.inf
    return abs(other - reference) / abs(reference) if reference else abs(other)


def _of_weight(reference: Tensor, copies: Sequence[Tensor]) -> float:
    scale = reference.abs().max().item()
    largest = _largest((copy - reference).abs().max().item() for copy in copies)
    return largest / scale if scale else largest


def _largest(numbers: Iterable[float]) -> float:
    """The largest; a number that is none counts as infinite."""
    return max((math.inf if math.isnan(number) else number for number in numbers), default=0.0)
