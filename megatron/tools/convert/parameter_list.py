"""The parameters of a checkpoint one by one: shapes, types, norms."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Parameter:
    """A weight, and its 2-norm, computed in fp64."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float

    @property
    def layer(self) -> str:
        """What the names of its layer begin with."""
        return self.name.removeprefix("tied_modules.").split(".")[0]

    @property
    def count(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def parameters(weights: Mapping[str, Tensor]) -> list[Parameter]:
    """All of them, in their order."""
    return [
        Parameter(
            name,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            torch.linalg.vector_norm(tensor, dtype=torch.float64).item(),
        )
        for name, tensor in tqdm(weights.items(), desc="measuring", disable=None)
    ]


def by_layer(found: list[Parameter]) -> Iterator[tuple[str, list[Parameter]]]:
    """Layer after layer."""
    for layer, group in groupby(found, key=lambda parameter: parameter.layer):
        yield layer, list(group)


def joint_norm(found: list[Parameter]) -> float:
    """The 2-norm of all together."""
    return math.sqrt(sum(parameter.norm**2 for parameter in found))


_TITLES = {
    "newest": "newest tag",
    "tags": "tags",
    "iteration": "iteration",
    "consumed_samples": "samples",
    "consumed_tokens": "tokens",
    "layout": "layout",
    "model": "model",
    "holds": "holds",
    "versions": "versions",
    "whole": "whole",
    "loaded_by": "loaded by",
}


def heading(facts: Mapping[str, Any]) -> str:
    """What is known of the whole."""
    lines = [f"{facts['path']}: {facts['kind']}"]
    lines += [f"  {title:12}{_words(facts[name])}" for name, title in _TITLES.items() if facts.get(name) is not None]
    return "\n".join(lines)


def listing(found: list[Parameter]) -> str:
    """Each parameter, in its layer."""
    rows = list(_rows(found))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:{widths[0]}}  {shape:>{widths[1]}}  {dtype:{widths[2]}}  {norm}" for name, shape, dtype, norm in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def as_json(facts: Mapping[str, Any], found: list[Parameter]) -> str:
    """All of it, for programs. A norm that is not a number is null."""
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
    for layer, group in by_layer(found):
        count = sum(parameter.count for parameter in group)
        yield layer, f"{count:,}", "", f"{joint_norm(group):.6g}"
        for parameter in group:
            name = parameter.name.removeprefix("tied_modules.").removeprefix(f"{layer}.")
            yield f"  {name}", " x ".join(map(str, parameter.shape)), parameter.dtype, f"{parameter.norm:.6g}"
    yield "all", f"{sum(parameter.count for parameter in found):,}", "", f"{joint_norm(found):.6g}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        told = {name.removeprefix("--").replace("-", " "): part for name, part in value.items()}
        # By identity, for 0 equals False.
        is_off = {name: part is None or part is False or part == "none" for name, part in told.items()}
        return ", ".join(f"{name} {part}" for name, part in told.items() if not is_off[name])
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
