"""What tools/inspect_checkpoint.py prints: the parameters of a checkpoint, or the differences between two."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron.tools.command_line import progress_bar


@dataclass(frozen=True)
class Parameter:
    """A parameter of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    """2-norm, computed in fp64."""

    @property
    def layer(self) -> str:
        """The first part of its name, which the parameters of a layer share."""
        return self.name.removeprefix("tied_modules.").split(".")[0]

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameters(weights: Mapping[str, Tensor]) -> list[Parameter]:
    """The parameters of a checkpoint, in its order."""
    return [
        Parameter(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            torch.linalg.vector_norm(tensor, dtype=torch.float64).item(),
        )
        for name, tensor in progress_bar(weights.items(), desc="measuring")
    ]


_TITLES = {
    "newest": "newest",
    "tags": "checkpoints",
    "iteration": "iteration",
    "consumed_samples": "samples",
    "consumed_tokens": "tokens",
    "layout": "layout",
    "model": "model",
    "kinds": "layers",
    "holds": "contains",
    "versions": "versions",
    "whole": "complete",
    "loaded_by": "loaded by",
}


def heading(facts: Mapping[str, Any]) -> str:
    """The lines above the parameters: the facts of a checkpoint."""
    lines = [f"{facts['path']}: {facts['kind']}"]
    lines += [f"  {title:12}{_shown(facts[name])}" for name, title in _TITLES.items() if facts.get(name) is not None]
    return "\n".join(lines)


def listing(found: list[Parameter]) -> str:
    """A line for each parameter and each layer."""
    rows = list(_rows(found))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:{widths[0]}}  {shape:>{widths[1]}}  {dtype:{widths[2]}}  {norm}" for name, shape, dtype, norm in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def parameters_as_json(facts: Mapping[str, Any], found: list[Parameter]) -> str:
    """Facts and parameters as JSON. A norm that is not finite is null."""
    listed = [
        {
            "name": parameter.name,
            "shape": parameter.shape,
            "dtype": parameter.dtype,
            "norm": parameter.norm if math.isfinite(parameter.norm) else None,
        }
        for parameter in found
    ]
    return json.dumps({**facts, "parameters": listed}, indent=2)


def _rows(found: list[Parameter]) -> Iterator[tuple[str, str, str, str]]:
    yield "layer", "shape", "type", "norm"
    for layer, parameters_of_layer in groupby(found, key=lambda parameter: parameter.layer):
        group = list(parameters_of_layer)
        yield layer, *_total(group)
        for parameter in group:
            name = parameter.name.removeprefix("tied_modules.").removeprefix(f"{layer}.")
            yield f"  {name}", " x ".join(map(str, parameter.shape)), parameter.dtype, f"{parameter.norm:.6g}"
    yield "all", *_total(found)


def _total(group: list[Parameter]) -> tuple[str, str, str]:
    norm = math.sqrt(sum(parameter.norm**2 for parameter in group))
    return f"{sum(parameter.count for parameter in group):,}", "", f"{norm:.6g}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        # Settings that are off are not shown; compared by identity, since 0 equals False.
        entries = {
            key: entry for key, entry in value.items() if not (entry is None or entry is False or entry == "none")
        }
        return ", ".join(f"{key.removeprefix('--').replace('-', ' ')} {entry}" for key, entry in entries.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class Difference:
    """The difference of a tensor between two checkpoints, a and b."""

    name: str
    absolute: float
    """max |b - a|"""
    relative: float
    """max |b - a| / max |a|; infinite if a value is not finite."""
    note: str = ""
    """Why they cannot be compared."""


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Difference]:
    """One for each tensor, in the order of the first, followed by tensors that only the second has."""
    found = [_difference(name, first[name], second.get(name)) for name in progress_bar(first, desc="comparing")]
    return found + [Difference(name, math.inf, math.inf, "only in the second") for name in second if name not in first]


def _difference(name: str, a: Tensor, b: Tensor | None) -> Difference:
    if b is None:
        return Difference(name, math.inf, math.inf, "only in the first")
    if a.shape != b.shape:
        return Difference(name, math.inf, math.inf, f"{list(a.shape)} and {list(b.shape)}")
    if a.equal(b) or not a.numel():
        return Difference(name, 0.0, 0.0)
    absolute = (b.double() - a.double()).abs().max().item()
    scale = a.double().abs().max().item()
    if not math.isfinite(absolute):
        return Difference(name, math.inf, math.inf, "values that are not finite")
    return Difference(name, absolute, absolute / scale if scale else absolute)


def differences_as_text(found: list[Difference], tolerance: float) -> str:
    """A line for each tensor that differs by more than the tolerance, and a summary."""
    beyond = [difference for difference in found if difference.relative > tolerance]
    width = max((len(difference.name) for difference in beyond), default=0)
    lines = [f"{difference.name:{width}}  {difference.note or _numbers(difference)}" for difference in beyond]
    largest = max((difference.relative for difference in found), default=0.0)
    lines.append(
        f"{len(found) - len(beyond)} of {len(found)} tensors are equal, largest relative difference {largest:.3g}"
    )
    return "\n".join(lines)


def differences_as_json(found: list[Difference], tolerance: float) -> str:
    """The differences as JSON. An infinite one is null."""
    tensors = [
        {name: None if value == math.inf else value for name, value in asdict(difference).items()}
        for difference in found
    ]
    return json.dumps({"tolerance": tolerance, "equal": are_equal(found, tolerance), "tensors": tensors}, indent=2)


def are_equal(found: list[Difference], tolerance: float) -> bool:
    """Whether no tensor differs by more than the tolerance."""
    return all(difference.relative <= tolerance for difference in found)


def _numbers(difference: Difference) -> str:
    return f"absolute {difference.absolute:.3g}, relative {difference.relative:.3g}"
