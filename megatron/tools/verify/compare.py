"""Compares the results of two runs: losses, gradient norms, the gradients of the first step, and the weights.

Comparing only the final weights misleads. Adam normalizes gradients, so an element whose gradient is pure rounding
error makes a step as long as any other, in a direction that depends on how the layout rounds. Gradients of the first
step have no such history: all layouts compute them from the same weights and samples, so they differ by rounding
error only, and their bound is fixed.

Two things may differ by more without a fault: a gradient that is zero in exact arithmetic, and everything after the
first step, since training at a large learning rate, or with an optimizer that takes signs or makes gradients
orthogonal, amplifies rounding errors. Runs of the reference from perturbed initial weights measure by how much.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

SAFETY = 10.0
"""A difference may be this multiple of the difference between perturbed runs of the reference."""
_SMALLEST_SCALE = 1e-3
"""A gradient is compared relative to its largest element, or to this fraction of the model's largest if that is more:
the gradient of a parameter without effect, such as a bias of attention's keys, is pure rounding error."""
_NOISE = 0.5
"""A gradient is pure rounding error if rounding changes this fraction of it; of others it changes 0.01 in bf16."""

Copies = Sequence[Tensor]
"""A full parameter, or a tensor of its shape, from each rank that has a copy."""


@dataclass(frozen=True)
class Result:
    """The results of a run. Mappings have the names of parameters as keys, in the order of the layers."""

    losses: Sequence[float | None]
    grad_norms: Sequence[float | None]
    learning_rates: Sequence[float]
    gradients: Mapping[str, Copies]
    """Gradients of the first step, before clipping."""
    first_weights: Mapping[str, Copies]
    """Weights after the first step."""
    weights: Mapping[str, Copies]
    """Weights after the last step."""
    first_step: int = 0
    """Index of the first iteration with a step; fp16 skips the step if gradients overflow."""


class Bounds(NamedTuple):
    """Tolerances: the largest differences that rounding errors explain."""

    loss: float
    grad_norm: float
    gradient: float
    weights: float
    other_weights: float = 2.0
    """In units of the learning rate: two steps of Adam in opposite directions, caused by rounding errors."""

    @classmethod
    def of(cls, dtype: str) -> "Bounds":
        """The bounds for fp32, bf16 or fp16: several times the differences measured between correct layouts."""
        bounds = {"fp32": (1e-4, 1e-4, 1e-4, 0.02), "fp16": (2e-4, 2e-3, 0.02, 0.5), "bf16": (1e-3, 1e-2, 0.1, 0.5)}
        return cls(*bounds[dtype])

    @property
    def clear_gradient(self) -> float:
        """Fraction of a parameter's largest gradient above which rounding does not decide an element's step."""
        return min(10 * self.gradient, 0.5)


@dataclass(frozen=True)
class Differences:
    """The largest differences between a run and the reference."""

    loss: float
    """Largest relative difference of an iteration's loss."""
    grad_norm: float
    """Largest relative difference of an iteration's gradient norm."""
    gradient: float | None
    """Of an element in the first step, relative to its parameter's largest element; None if no gradients were saved."""
    weights: float
    """Of elements with a clear gradient in the first step, in units of the sum of the learning rates."""
    other_weights: float
    """Of the other elements, in the same unit."""
    first: str | None
    """The first quantity that is out of bounds, in the order in which training computes them."""
    kind: str = ""
    """Kind of the first quantity: initial weights, loss, gradient, norm or step."""
    iteration: int = 0
    """Iteration of the first quantity, from 1 on."""
    may_be_rounding: bool = False
    """Whether it may be rounding error, which perturbed runs can show: small gradients, or results after a step."""
    is_rounding: bool = False
    """Whether the runs agree only with the bounds that perturbed runs of the reference raise."""
    losses: Sequence[float] = field(default=(), compare=False)
    norms: Sequence[float] = field(default=(), compare=False)
    first_weights: float = field(default=0.0, compare=False)
    """The same as ``weights``, after the first step, in units of its learning rate."""
    noise: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The largest difference of each gradient that is pure rounding error, by parameter."""

    @property
    def agree(self) -> bool:
        """Whether all differences are within their bounds. NaN never is."""
        return self.first is None


_NONE = Differences(0.0, 0.0, 0.0, 0.0, 0.0, None)


def rounding_effects(reference: Result, others: Sequence[Result], bounds: Bounds) -> Differences:
    """The largest differences of ``others``, runs of the reference from weights perturbed by rounding errors."""
    noise = _noise(reference, others, bounds)
    runs = [compare(reference, other, bounds, replace(_NONE, noise=noise)) for other in others]
    return Differences(
        loss=_largest(run.loss for run in runs),
        grad_norm=_largest(run.grad_norm for run in runs),
        gradient=_largest(run.gradient or 0.0 for run in runs),
        weights=_largest(run.weights for run in runs),
        other_weights=_largest(run.other_weights for run in runs),
        first=None,
        losses=[_largest(differences) for differences in zip(*(run.losses for run in runs), strict=True)],
        norms=[_largest(differences) for differences in zip(*(run.norms for run in runs), strict=True)],
        first_weights=_largest(run.first_weights for run in runs),
        noise=noise,
    )


def _noise(reference: Result, others: Sequence[Result], bounds: Bounds) -> dict[str, float]:
    """The largest difference of each small gradient that is pure rounding error, by parameter."""
    noise = {}
    for name in _small_gradients(reference, bounds):
        gradient = reference.gradients[name][0]
        differences = [other.gradients[name][0] - gradient for other in others]
        if any(difference.norm() > _NOISE * gradient.norm() for difference in differences):
            noise[name] = _largest(difference.abs().max().item() for difference in differences)
    return noise


def _small_gradients(reference: Result, bounds: Bounds) -> set[str]:
    """Names of the gradients so small that they may be rounding errors of larger ones."""
    sizes = {name: copies[0].abs().max().item() for name, copies in reference.gradients.items()}
    return {name for name, size in sizes.items() if size < bounds.gradient * max(sizes.values())}


class _ByName(NamedTuple):
    """Differences of each parameter; weights have two, of elements with a clear gradient and of the others."""

    gradients: dict[str, float]
    first_weights: dict[str, tuple[float, float]]
    weights: dict[str, tuple[float, float]]


_Problem = tuple[str, int, str]
"""Kind, iteration and description of a quantity that is out of bounds."""


def compare(reference: Result, other: Result, bounds: Bounds, rounding: Differences = _NONE) -> Differences:
    """Compare ``other`` with ``reference``.

    ``rounding`` has the differences of perturbed runs of the reference. It raises the bounds of gradients that are pure
    rounding error, and of all results after the first step, in proportion to the difference of the gradients.
    """
    clear = _clear_gradients(reference, bounds, rounding.noise)
    rates, step = reference.learning_rates, reference.first_step
    names = _ByName(
        gradient_differences(reference, other, bounds, rounding.noise),
        _weight_differences(reference.first_weights, other.first_weights, rates[step : step + 1], clear),
        _weight_differences(reference.weights, other.weights, rates, clear),
    )
    result = Differences(
        loss=_largest(losses := _relative_differences(reference.losses, other.losses)),
        grad_norm=_largest(norms := _relative_differences(reference.grad_norms, other.grad_norms)),
        gradient=_largest(names.gradients.values()) if names.gradients else None,
        weights=_largest(clear_ones for clear_ones, _ in names.weights.values()),
        other_weights=_largest(rest for _, rest in names.weights.values()),
        first=None,
        losses=losses,
        norms=norms,
        first_weights=_largest(clear_ones for clear_ones, _ in names.first_weights.values()),
        noise=rounding.noise,
    )
    differing = [name for name in reversed(names.gradients) if not names.gradients[name] <= bounds.gradient]
    in_gradients = [("gradient", step + 1, _described(name, reference, other)) for name in differing]
    before = _problems_before_step(result, names, bounds, step + 1, in_gradients)
    after = _problems_after_step(result, names, bounds, step + 1, rounding)
    kind, iteration, text = next(iter(before + after), ("", 0, None))
    is_small = _small_gradients(reference, bounds).issuperset(differing) and before == in_gradients
    may_be_rounding = is_small and bool(before or after)
    return replace(result, first=text, kind=kind, iteration=iteration, may_be_rounding=may_be_rounding)


def _problems_before_step(
    result: Differences, names: _ByName, bounds: Bounds, first: int, in_gradients: list[_Problem]
) -> list[_Problem]:
    """Quantities out of their fixed bounds up to the step of iteration ``first``, in the order of training."""
    initial = [name for name, (_, rest) in names.first_weights.items() if not rest <= bounds.other_weights]
    return [
        *(("initial weights", first, f"initial {name}") for name in initial),
        *_out_of_bounds("loss", result.losses[:first], [bounds.loss] * first),
        *in_gradients,
        *_out_of_bounds("norm", result.norms[:first], [bounds.grad_norm] * first),
    ]


def _problems_after_step(
    result: Differences, names: _ByName, bounds: Bounds, first: int, rounding: Differences
) -> list[_Problem]:
    """Quantities out of bounds from this step on, where bounds grow with the differences in ``rounding``."""
    growth = SAFETY * max(1.0, (result.gradient or 0.0) / (rounding.gradient or math.inf))

    def raised(bound: float, *measured: float) -> float:
        return max(bound, growth * _largest(measured))

    def is_out_of_bounds(clear_ones: float, rest: float) -> bool:
        limit, rest_limit = (raised(getattr(bounds, of), getattr(rounding, of)) for of in ("weights", "other_weights"))
        return not (clear_ones <= limit and rest <= rest_limit)

    numbers, limit = range(1, len(result.losses) + 1), raised(bounds.weights, rounding.first_weights)
    stepped = [name for name, (clear_ones, _) in names.first_weights.items() if not clear_ones <= limit]
    ended = [name for name, differences in names.weights.items() if is_out_of_bounds(*differences)]
    return [
        *(("step", first, f"{name} after the first step") for name in stepped),
        *_out_of_bounds("loss", result.losses, [raised(bounds.loss, *rounding.losses[first:n]) for n in numbers]),
        *_out_of_bounds("norm", result.norms, [raised(bounds.grad_norm, *rounding.norms[first:n]) for n in numbers]),
        *(("step", len(result.losses), f"final {name}") for name in ended),
    ]


_QUANTITIES = {"loss": "loss", "norm": "gradient norm"}


def _out_of_bounds(kind: str, differences: Sequence[float], limits: Sequence[float]) -> list[_Problem]:
    numbered = enumerate(zip(differences, limits, strict=True), 1)
    iterations = [n for n, (difference, limit) in numbered if not difference <= limit]
    return [(kind, n, f"{_QUANTITIES[kind]} of iteration {n}") for n in iterations]


def _relative_differences(reference: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """Relative difference in each iteration; infinite for iterations that one of the runs lacks."""
    missing = [math.inf] * abs(len(reference) - len(other))
    return [_relative_difference(a, b) for a, b in zip(reference, other, strict=False)] + missing


def _relative_difference(reference: float | None, other: float | None) -> float:
    if reference is None or other is None:  # a step that fp16 skipped has no gradient norm
        return 0.0 if reference is other else math.inf
    return abs(other - reference) / abs(reference) if reference else abs(other)


def gradient_differences(
    reference: Result, other: Result, bounds: Bounds, noise: Mapping[str, float]
) -> dict[str, float]:
    """The largest difference of an element, relative to its parameter's largest element, by parameter."""
    scales = _scales(reference, bounds, noise)
    return {
        name: _largest_difference(copies[0], other.gradients.get(name, ())) / scales[name]
        for name, copies in reference.gradients.items()
    }


def _scales(reference: Result, bounds: Bounds, noise: Mapping[str, float]) -> dict[str, float]:
    """The scale of each gradient's differences. A gradient in ``noise`` may differ by SAFETY times its noise."""
    sizes = {name: copies[0].abs().max().item() for name, copies in reference.gradients.items()}
    smallest = _SMALLEST_SCALE * max(sizes.values(), default=0.0) or 1.0
    noise_scales = {name: SAFETY * difference / bounds.gradient for name, difference in noise.items()}
    return {name: max(size, smallest, noise_scales.get(name, 0.0)) for name, size in sizes.items()}


def _clear_gradients(reference: Result, bounds: Bounds, noise: Mapping[str, float]) -> dict[str, Tensor]:
    """Mask of the elements of each parameter whose first gradient is far above rounding errors."""
    scales = _scales(reference, bounds, noise)
    return {
        name: copies[0].abs() >= bounds.clear_gradient * scales[name] for name, copies in reference.gradients.items()
    }


def _described(name: str, reference: Result, other: Result) -> str:
    """Description of a gradient that differs: the parameter's name, and the factor if it differs by a factor."""
    gradient, copies = reference.gradients[name][0], other.gradients.get(name)
    if not copies or not gradient.any():
        return f"gradient of {name}"
    factor = (copies[0].flatten() @ gradient.flatten() / gradient.square().sum()).item()
    rest = max((copy - factor * gradient).norm() / gradient.norm() for copy in copies)
    is_multiple = rest < 0.01 * abs(factor) and abs(factor - 1) > 0.01
    return f"gradient of {name}{f' ({factor:.3g} times the reference)' if is_multiple else ''}"


def _weight_differences(
    reference: Mapping[str, Copies], other: Mapping[str, Copies], rates: Sequence[float], clear: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Differences of elements with and without a clear gradient, in units of the sum of the learning rates.

    The rounding of the weight itself in each step does not count: a norm's weight of 1 is rounded by 6e-8.
    """
    differences = {}
    unit = sum(rates) or torch.finfo(torch.float32).tiny
    for name, (weight, *_) in reference.items():
        rounding = 2 * len(rates) * torch.finfo(torch.float32).eps * weight.abs().max().item()
        chosen = clear.get(name, torch.zeros_like(weight, dtype=torch.bool))
        both = [_largest_difference(weight, other.get(name, ()), elements) for elements in (chosen, ~chosen)]
        differences[name] = (max(both[0] - rounding, 0.0) / unit, max(both[1] - rounding, 0.0) / unit)
    return differences


def _largest_difference(reference: Tensor, copies: Copies, chosen: Tensor | None = None) -> float:
    """The largest difference of an element in any copy; infinite if there are no copies or the shapes differ."""
    if not copies or any(copy.shape != reference.shape for copy in copies):
        return math.inf
    differences = [(copy - reference).abs() for copy in copies]
    if chosen is not None:
        differences = [difference[chosen] for difference in differences]
    return _largest(difference.max().item() for difference in differences if difference.numel())


def _largest(numbers: Iterable[float]) -> float:
    """The largest number; NaN counts as infinite, and without numbers it is 0."""
    return max((math.inf if math.isnan(number) else number for number in numbers), default=0.0)
