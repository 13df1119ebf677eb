"""Compare what two runs computed: losses, gradient norms, the gradients of the first step and the weights.

Comparing only the final weights misleads. Adam divides a gradient by its own size, so an element whose gradient is
nothing but rounding makes a step as long as any other, in a direction that each layout rounds differently. Gradients
of the first step have no such history: all layouts take them of the same weights and the same samples, so they differ
by rounding only. They are read from the checkpoint after that step, where Adam's first moment is (1 - beta1) times the
clipped gradient, in fp32, on every layout.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.parameter_state import WEIGHT, stage_states
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.tracker import newest, tag_at, tag_name
from megatron.common.errors import CheckpointError
from megatron.config import OptimConfig
from megatron.model.architectures import architecture_of
from megatron.model.spec import ParameterSpec, is_trained
from megatron.tools.verify.request import checkpoint_folder, metrics_file

_MOMENTS = ("exp_avg", "momentum_buffer")
"""An optimizer's first moment, of Adam and its relatives or of SGD: after one step, a multiple of the gradient."""
_SMALLEST_SCALE = 1e-3
"""A gradient is compared relative to its largest element, or to this part of the model's largest if that is more: a
parameter without effect, such as a bias of attention's keys, has a gradient of nothing but rounding."""

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

    def agree(self, bounds: Bounds) -> bool:
        """Whether everything is within ``bounds``. NaN never is."""
        found = (self.loss, self.grad_norm, self.gradient or 0.0, self.weights, self.other_weights)
        return self.first is None and all(value <= bound for value, bound in zip(found, bounds, strict=True))


def read_result(long: Path, short: Path, optim: OptimConfig) -> Result:
    """Read what a run saved in the folder ``long``, and its checkpoint after its first step, in ``short`` or there.

    Raises CheckpointError if a checkpoint is incomplete or no step was made.
    """
    lines = [json.loads(line) for line in metrics_file(long).read_text(encoding="utf-8").splitlines()]
    norms = [line["grad_norm"] for line in lines]
    step = first_step(long)
    states = _parameter_states(tag_at(checkpoint_folder(short) / tag_name(step + 1)))
    moment = next((key for key in _MOMENTS if any(key in copies[0] for copies in states.values())), None)
    clipped = min(1.0, optim.clip_grad / (norms[step] + 1e-6)) if optim.clip_grad else 1.0
    scale = 1 / clipped / (1 - optim.adam_beta1 if moment == "exp_avg" else 1)
    return Result(
        losses=[line["lm_loss"] for line in lines],
        grad_norms=norms,
        learning_rates=[line["learning_rate"] for line in lines],
        gradients={
            name: [copy[moment] * scale for copy in copies]
            for name, copies in states.items()
            if moment and moment in copies[0]
        },
        first_weights=_of_key(states, WEIGHT),
        weights=_of_key(_parameter_states(newest(checkpoint_folder(long))), WEIGHT),
        first_step=step,
    )


def first_step(folder: Path) -> int:
    """Index of the first iteration whose step the run in ``folder`` did not skip.

    Raises CheckpointError if it skipped all.
    """
    lines = metrics_file(folder).read_text(encoding="utf-8").splitlines()
    for index, line in enumerate(lines):
        if json.loads(line)["grad_norm"] is not None:
            return index
    raise CheckpointError(
        f"no step in {len(lines)} iterations, since all gradients overflowed: raise --iterations or "
        "lower --initial-loss-scale"
    )


def _of_key(states: Mapping[str, Sequence[Mapping[str, Tensor]]], key: str) -> dict[str, Copies]:
    return {name: [copy[key] for copy in copies] for name, copies in states.items()}


def _parameter_states(saved: SavedRun) -> dict[str, list[dict[str, Tensor]]]:
    """Weight and moments of each whole parameter that is trained, in the order of the layers.

    A parameter that tensor parallelism cuts has one copy on each pipeline stage that holds it, any other has one on
    each tensor-parallel rank of those. The vocabulary is without its padding.
    """
    config = saved.whole_model_config()
    named = architecture_of(config).named_parameters(config)
    specs = {name: spec for name, spec in named.items() if is_trained(config, name)}
    states: dict[str, list[dict[str, Tensor]]] = {name: [] for name in specs}
    for states_of_stage in stage_states(saved):
        for name, parts in states_of_stage.items():
            states[name] += _whole_copies(specs[name], parts)
    if missing := [name for name, copies in states.items() if not copies]:
        raise CheckpointError(f"{saved.path} has no state of {', '.join(missing)}")
    return states


def _whole_copies(spec: ParameterSpec, parts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of a parameter whose state on each tensor-parallel rank is in ``parts``."""
    keys = [key for key, value in parts[0].items() if isinstance(value, Tensor) and value.dim()]
    rows = spec.shape[0] if spec.is_vocabulary else None
    if spec.shard_dim is not None:
        yield {key: torch.cat([part[key] for part in parts], spec.shard_dim)[:rows] for key in keys}
        return
    for part in parts:
        yield {key: part[key][:rows] for key in keys}


def compare(reference: Result, other: Result, bounds: Bounds) -> Differences:
    """Compare ``other`` with ``reference``."""
    losses = _of_series(reference.losses, other.losses)
    norms = _of_series(reference.grad_norms, other.grad_norms)
    gradients = gradient_differences(reference, other)
    clear = {name: _has_clear_gradient(copies[0], bounds) for name, copies in reference.gradients.items()}
    step = reference.first_step
    first_weights = _of_weights(reference.first_weights, other.first_weights, reference.learning_rates[step], clear)
    weights = _of_weights(reference.weights, other.weights, sum(reference.learning_rates), clear)
    first = step + 1
    beyond = [
        *(("initial weights", first, f"initial {name}") for name, (_, rest) in first_weights.items()
          if not rest <= bounds.other_weights),
        *_beyond("loss", losses[:first], bounds.loss, "loss of iteration"),
        *(("gradient", first,
           f"gradient of {name}{_multiple(reference.gradients[name][0], other.gradients.get(name))}")
          for name in reversed(gradients) if not gradients[name] <= bounds.gradient),
        *_beyond("norm", norms[:first], bounds.grad_norm, "gradient norm of iteration"),
        *(("step", first, f"{name} after the first step") for name, (clear_ones, _) in first_weights.items()
          if not clear_ones <= bounds.weights),
        *_beyond("loss", losses, bounds.loss, "loss of iteration"),
        *_beyond("norm", norms, bounds.grad_norm, "gradient norm of iteration"),
        *(("step", len(losses), f"final {name}") for name, (clear_ones, rest) in weights.items()
          if not (clear_ones <= bounds.weights and rest <= bounds.other_weights)),
    ]  # fmt: skip
    kind, iteration, text = next(iter(beyond), ("", 0, None))
    return Differences(
        loss=_largest(losses),
        grad_norm=_largest(norms),
        gradient=_largest(gradients.values()) if gradients else None,
        weights=_largest(clear_ones for clear_ones, _ in weights.values()),
        other_weights=_largest(rest for _, rest in weights.values()),
        first=text,
        kind=kind,
        iteration=iteration,
    )


def _beyond(kind: str, differences: Sequence[float], bound: float, quantity: str) -> list[tuple[str, int, str]]:
    return [(kind, n, f"{quantity} {n}") for n, difference in enumerate(differences, 1) if not difference <= bound]


def _of_series(reference: Sequence[float | None], other: Sequence[float | None]) -> list[float]:
    """Relative difference of each iteration; infinite if one run has fewer of them."""
    missing = [math.inf] * abs(len(reference) - len(other))
    return [_of_number(a, b) for a, b in zip(reference, other, strict=False)] + missing


def _of_number(reference: float | None, other: float | None) -> float:
    if reference is None or other is None:  # a step that fp16 skipped has no gradient norm
        return 0.0 if reference is other else math.inf
    return abs(other - reference) / abs(reference) if reference else abs(other)


def gradient_differences(reference: Result, other: Result) -> dict[str, float]:
    """The largest difference of an element, relative to its parameter's largest, by name."""
    sizes = {name: copies[0].abs().max().item() for name, copies in reference.gradients.items()}
    smallest = _SMALLEST_SCALE * max(sizes.values(), default=0.0)
    return {
        name: _largest_difference(copies[0], other.gradients.get(name, ())) / (max(sizes[name], smallest) or 1.0)
        for name, copies in reference.gradients.items()
    }


def _multiple(reference: Tensor, copies: Copies | None) -> str:
    """The factor of the gradient, if it differs only by a factor."""
    if not copies or not reference.any():
        return ""
    factor = (copies[0].flatten() @ reference.flatten() / reference.square().sum()).item()
    rest = max((copy - factor * reference).norm() / reference.norm() for copy in copies)
    is_multiple = rest < 0.01 * abs(factor) and abs(factor - 1) > 0.01
    return f" ({factor:.3g} times the reference)" if is_multiple else ""


def _has_clear_gradient(gradient: Tensor, bounds: Bounds) -> Tensor:
    """Elements of a parameter whose first gradient is far above rounding."""
    return gradient.abs() >= bounds.clear_gradient * gradient.abs().max().clamp(min=torch.finfo(torch.float32).tiny)


def _of_weights(
    reference: Mapping[str, Copies], other: Mapping[str, Copies], learning_rate: float, clear: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Differences of elements with and without a clear gradient, in units of ``learning_rate``, by name."""
    found = {}
    for name, (weight, *_) in reference.items():
        unit = learning_rate + torch.finfo(torch.float32).eps * weight.abs().max().item()
        chosen = clear.get(name, torch.zeros_like(weight, dtype=torch.bool))
        copies = other.get(name, ())
        found[name] = (
            _largest_difference(weight, copies, chosen) / unit,
            _largest_difference(weight, copies, ~chosen) / unit,
        )
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
