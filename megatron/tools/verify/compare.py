"""Compare what two runs computed: losses, gradient norms, the gradients of the first step and the weights.

Comparing only the final weights misleads. Adam divides a gradient by its own size, so an element whose gradient is
nothing but rounding makes a step as long as any other, in a direction that each layout rounds differently. Gradients
of the first step have no such history: all layouts take them of the same weights and the same samples, so they differ
by rounding only, and their bound is fixed.

Two things may differ by more without a fault: a gradient that is zero in exact arithmetic, and what follows from the
first step, since training at a large learning rate, or with an optimizer that takes signs or makes gradients
orthogonal, amplifies rounding. Runs of the reference from initial weights that differ by rounding show how far.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

SAFETY = 10.0
"""A difference may be this multiple of what runs of the reference differ by."""
_SMALLEST_SCALE = 1e-3
"""A gradient is compared relative to its largest element, or to this part of the model's largest if that is more: a
parameter without effect, such as a bias of attention's keys, has a gradient of nothing but rounding."""
_NOISE = 0.5
"""A gradient of which rounding changes this part is nothing but rounding. It changes a hundredth of others in bf16."""

Copies = Sequence[Tensor]
"""A full parameter, or something of its shape, from each rank that has all of it."""


@dataclass(frozen=True)
class Result:
    """What a run computed. The mappings are by name of parameter, in the order of the layers."""

    losses: Sequence[float | None]
    grad_norms: Sequence[float | None]
    learning_rates: Sequence[float]
    gradients: Mapping[str, Copies]
    """Of the first step, before clipping."""
    first_weights: Mapping[str, Copies]
    """After the first step."""
    weights: Mapping[str, Copies]
    """After the last step."""
    first_step: int = 0
    """Index of the first iteration with a step; fp16 skips those whose gradients overflow."""


class Bounds(NamedTuple):
    """The largest differences that rounding explains."""

    loss: float
    grad_norm: float
    gradient: float
    weights: float
    other_weights: float = 2.0
    """Steps of a learning rate each, in opposite directions: what Adam can make of rounding."""

    @classmethod
    def of(cls, dtype: str) -> "Bounds":
        """The bounds for fp32, bf16 or fp16: several times what is found between layouts that are right."""
        bounds = {"fp32": (1e-4, 1e-4, 1e-4, 0.02), "fp16": (2e-4, 2e-3, 0.02, 0.5), "bf16": (1e-3, 1e-2, 0.1, 0.5)}
        return cls(*bounds[dtype])

    @property
    def clear_gradient(self) -> float:
        """Part of a parameter's largest gradient above which rounding cannot decide on an element's step."""
        return min(10 * self.gradient, 0.5)


@dataclass(frozen=True)
class Differences:
    """The largest differences between a run and the reference."""

    loss: float
    """Of an iteration, relative."""
    grad_norm: float
    """Of an iteration, relative."""
    gradient: float | None
    """Of an element in the first step, relative to the largest element of its parameter; None if none was kept."""
    weights: float
    """Of an element with a clear gradient in the first step, in units of the sum of the learning rates."""
    other_weights: float
    """Of the other elements, in the same unit."""
    first: str | None
    """The first quantity that is out of bounds, in the order in which training computes them."""
    kind: str = ""
    """Of the first: initial weights, loss, gradient, norm or step."""
    iteration: int = 0
    """Of the first, from 1 on."""
    may_be_rounding: bool = False
    """Whether runs of the reference may show that it is rounding: small gradients, or what follows from a step."""
    is_rounding: bool = False
    """Whether it agrees only since rounding makes as much of a difference in the reference."""
    losses: Sequence[float] = field(default=(), compare=False)
    norms: Sequence[float] = field(default=(), compare=False)
    first_weights: float = field(default=0.0, compare=False)
    """As ``weights``, after the first step, in units of its learning rate."""
    noise: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The largest difference of each gradient that is nothing but rounding."""

    @property
    def agree(self) -> bool:
        """Whether everything is within its bound. NaN never is."""
        return self.first is None


_NONE = Differences(0.0, 0.0, 0.0, 0.0, 0.0, None)


def what_rounding_becomes(reference: Result, others: Sequence[Result], bounds: Bounds) -> Differences:
    """The largest differences of ``others``, runs of the reference from weights that differ by rounding."""
    noise = _noise(reference, others, bounds)
    found = [compare(reference, other, bounds, replace(_NONE, noise=noise)) for other in others]
    return Differences(
        loss=_largest(one.loss for one in found),
        grad_norm=_largest(one.grad_norm for one in found),
        gradient=_largest(one.gradient or 0.0 for one in found),
        weights=_largest(one.weights for one in found),
        other_weights=_largest(one.other_weights for one in found),
        first=None,
        losses=[_largest(of_iteration) for of_iteration in zip(*(one.losses for one in found), strict=True)],
        norms=[_largest(of_iteration) for of_iteration in zip(*(one.norms for one in found), strict=True)],
        first_weights=_largest(one.first_weights for one in found),
        noise=noise,
    )


def _noise(reference: Result, others: Sequence[Result], bounds: Bounds) -> dict[str, float]:
    """By how much each gradient differs, of those that are small and nothing but rounding."""
    noise = {}
    for name in _small_gradients(reference, bounds):
        gradient = reference.gradients[name][0]
        differences = [other.gradients[name][0] - gradient for other in others]
        if any(one.norm() > _NOISE * gradient.norm() for one in differences):
            noise[name] = _largest(one.abs().max().item() for one in differences)
    return noise


def _small_gradients(reference: Result, bounds: Bounds) -> set[str]:
    """Those that may be nothing but rounding of larger ones."""
    sizes = {name: copies[0].abs().max().item() for name, copies in reference.gradients.items()}
    return {name for name, size in sizes.items() if size < bounds.gradient * max(sizes.values())}


class _ByName(NamedTuple):
    """Differences of each parameter. Of weights they are those of elements with a clear gradient, and of the others."""

    gradients: dict[str, float]
    first_weights: dict[str, tuple[float, float]]
    weights: dict[str, tuple[float, float]]


_Problem = tuple[str, int, str]
"""Kind, iteration and words of something that is out of bounds."""


def compare(reference: Result, other: Result, bounds: Bounds, rounding: Differences = _NONE) -> Differences:
    """Compare ``other`` with ``reference``.

    ``rounding`` is what further runs of the reference differ in. It raises the bounds of gradients that are nothing but
    rounding, and of what follows from the first step, of that as much more as gradients differ more.
    """
    clear = _clear_gradients(reference, bounds, rounding.noise)
    rates, step = reference.learning_rates, reference.first_step
    names = _ByName(
        gradient_differences(reference, other, bounds, rounding.noise),
        _of_weights(reference.first_weights, other.first_weights, rates[step : step + 1], clear),
        _of_weights(reference.weights, other.weights, rates, clear),
    )
    found = Differences(
        loss=_largest(losses := _of_series(reference.losses, other.losses)),
        grad_norm=_largest(norms := _of_series(reference.grad_norms, other.grad_norms)),
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
    of_gradients = [("gradient", step + 1, _described(name, reference, other)) for name in differing]
    before = _before_the_step(found, names, bounds, step + 1, of_gradients)
    after = _after_the_step(found, names, bounds, step + 1, rounding)
    kind, iteration, text = next(iter(before + after), ("", 0, None))
    is_small = _small_gradients(reference, bounds).issuperset(differing) and before == of_gradients
    may_be_rounding = is_small and bool(before or after)
    return replace(found, first=text, kind=kind, iteration=iteration, may_be_rounding=may_be_rounding)


def _before_the_step(
    found: Differences, names: _ByName, bounds: Bounds, first: int, of_gradients: list[_Problem]
) -> list[_Problem]:
    """What is out of its bound, which is fixed, up to the step of iteration ``first``, in the order of training."""
    drawn = [name for name, (_, rest) in names.first_weights.items() if not rest <= bounds.other_weights]
    return [
        *(("initial weights", first, f"initial {name}") for name in drawn),
        *_beyond("loss", found.losses[:first], [bounds.loss] * first),
        *of_gradients,
        *_beyond("norm", found.norms[:first], [bounds.grad_norm] * first),
    ]


def _after_the_step(
    found: Differences, names: _ByName, bounds: Bounds, first: int, rounding: Differences
) -> list[_Problem]:
    """The same from that step on, where bounds are raised as far as ``rounding`` is amplified."""
    growth = SAFETY * max(1.0, (found.gradient or 0.0) / (rounding.gradient or math.inf))

    def raised(bound: float, *measured: float) -> float:
        return max(bound, growth * _largest(measured))

    def is_beyond(clear_ones: float, rest: float) -> bool:
        most, most_of_rest = (raised(getattr(bounds, of), getattr(rounding, of)) for of in ("weights", "other_weights"))
        return not (clear_ones <= most and rest <= most_of_rest)

    numbers, most = range(1, len(found.losses) + 1), raised(bounds.weights, rounding.first_weights)
    stepped = [name for name, (clear_ones, _) in names.first_weights.items() if not clear_ones <= most]
    ended = [name for name, differences in names.weights.items() if is_beyond(*differences)]
    return [
        *(("step", first, f"{name} after the first step") for name in stepped),
        *_beyond("loss", found.losses, [raised(bounds.loss, *rounding.losses[first:n]) for n in numbers]),
        *_beyond("norm", found.norms, [raised(bounds.grad_norm, *rounding.norms[first:n]) for n in numbers]),
        *(("step", len(found.losses), f"final {name}") for name in ended),
    ]


_QUANTITIES = {"loss": "loss", "norm": "gradient norm"}


def _beyond(kind: str, differences: Sequence[float], limits: Sequence[float]) -> list[_Problem]:
    numbered = enumerate(zip(differences, limits, strict=True), 1)
    return [(kind, n, f"{_QUANTITIES[kind]} of iteration {n}") for n, (one, limit) in numbered if not one <= limit]


def _of_series(reference: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """Relative difference of each iteration; infinite if one run has fewer of them."""
    missing = [math.inf] * abs(len(reference) - len(other))
    return [_of_number(a, b) for a, b in zip(reference, other, strict=False)] + missing


def _of_number(reference: float | None, other: float | None) -> float:
    if reference is None or other is None:  # a step that fp16 skipped has no gradient norm
        return 0.0 if reference is other else math.inf
    return abs(other - reference) / abs(reference) if reference else abs(other)


def gradient_differences(
    reference: Result, other: Result, bounds: Bounds, noise: Mapping[str, float]
) -> dict[str, float]:
    """The largest difference of an element, relative to its parameter's largest, by name."""
    scales = _scales(reference, bounds, noise)
    return {
        name: _largest_difference(copies[0], other.gradients.get(name, ())) / scales[name]
        for name, copies in reference.gradients.items()
    }


def _scales(reference: Result, bounds: Bounds, noise: Mapping[str, float]) -> dict[str, float]:
    """What the differences of each gradient are relative to. One that is ``noise`` may differ by SAFETY times that."""
    sizes = {name: copies[0].abs().max().item() for name, copies in reference.gradients.items()}
    smallest = _SMALLEST_SCALE * max(sizes.values(), default=0.0) or 1.0
    of_noise = {name: SAFETY * difference / bounds.gradient for name, difference in noise.items()}
    return {name: max(size, smallest, of_noise.get(name, 0.0)) for name, size in sizes.items()}


def _clear_gradients(reference: Result, bounds: Bounds, noise: Mapping[str, float]) -> dict[str, Tensor]:
    """Elements of each parameter whose first gradient is far above rounding."""
    scales = _scales(reference, bounds, noise)
    return {
        name: copies[0].abs() >= bounds.clear_gradient * scales[name] for name, copies in reference.gradients.items()
    }


def _described(name: str, reference: Result, other: Result) -> str:
    """The gradient of the parameter ``name``, with its factor if it differs only by a factor."""
    gradient, copies = reference.gradients[name][0], other.gradients.get(name)
    if not copies or not gradient.any():
        return f"gradient of {name}"
    factor = (copies[0].flatten() @ gradient.flatten() / gradient.square().sum()).item()
    rest = max((copy - factor * gradient).norm() / gradient.norm() for copy in copies)
    is_multiple = rest < 0.01 * abs(factor) and abs(factor - 1) > 0.01
    return f"gradient of {name}{f' ({factor:.3g} times the reference)' if is_multiple else ''}"


def _of_weights(
    reference: Mapping[str, Copies], other: Mapping[str, Copies], rates: Sequence[float], clear: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Differences of elements with and without a clear gradient, in units of the sum of the learning rates, by name.

    What rounding the weight itself makes of each step does not count: a norm's weight of 1 is rounded by 6e-8.
    """
    found = {}
    unit = sum(rates) or torch.finfo(torch.float32).tiny
    for name, (weight, *_) in reference.items():
        rounding = 2 * len(rates) * torch.finfo(torch.float32).eps * weight.abs().max().item()
        chosen = clear.get(name, torch.zeros_like(weight, dtype=torch.bool))
        both = [_largest_difference(weight, other.get(name, ()), elements) for elements in (chosen, ~chosen)]
        found[name] = (max(both[0] - rounding, 0.0) / unit, max(both[1] - rounding, 0.0) / unit)
    return found


def _largest_difference(reference: Tensor, copies: Copies, chosen: Tensor | None = None) -> float:
    """Of an element, with any of the copies; infinite if there are none or their shape is another."""
    if not copies or any(copy.shape != reference.shape for copy in copies):
        return math.inf
    differences = [(copy - reference).abs() for copy in copies]
    if chosen is not None:
        differences = [difference[chosen] for difference in differences]
    return _largest(difference.max().item() for difference in differences if difference.numel())


def _largest(numbers: Iterable[float]) -> float:
    """The largest; NaN counts as infinite."""
    return max((math.inf if math.isnan(number) else number for number in numbers), default=0.0)
