"""Two checkpoints tensor by tensor, whatever layouts they come from."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Difference:
    """How far a tensor of the second checkpoint is from the first's of the same name."""

    name: str
    absolute: float
    """max |b - a|"""
    relative: float
    """max |b - a| / max |a|; a value that is not a number counts as infinite."""
    note: str = ""
    """Why they cannot be compared at all."""


def differences(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[Difference]:
    """One for each tensor, in the order of the first, and behind them what only the second has."""
    found = [_difference(name, first[name], second.get(name)) for name in tqdm(first, desc="comparing", disable=None)]
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
        return Difference(name, math.inf, math.inf, "values that are no numbers")
    return Difference(name, absolute, absolute / scale if scale else absolute)


def as_text(found: list[Difference], tolerance: float) -> str:
    """A line for each tensor that is further off than the tolerance, and one for all."""
    beyond = [difference for difference in found if difference.relative > tolerance]
    width = max((len(difference.name) for difference in beyond), default=0)
    lines = [f"{difference.name:{width}}  {difference.note or _numbers(difference)}" for difference in beyond]
    largest = max((difference.relative for difference in found), default=0.0)
    lines.append(
        f"{len(found) - len(beyond)} of {len(found)} tensors are equal, largest relative difference {largest:.3g}"
    )
    return "\n".join(lines)


def as_json(found: list[Difference], tolerance: float) -> str:
    """All of them, for programs. A difference that is infinite is null."""
    tensors = [
        {name: None if value == math.inf else value for name, value in asdict(difference).items()}
        for difference in found
    ]
    return json.dumps({"tolerance": tolerance, "equal": are_equal(found, tolerance), "tensors": tensors}, indent=2)


def are_equal(found: list[Difference], tolerance: float) -> bool:
    """Whether no tensor is further off than the tolerance."""
    return all(difference.relative <= tolerance for difference in found)


def _numbers(difference: Difference) -> str:
    return f"absolute {difference.absolute:.3g}, relative {difference.relative:.3g}"
