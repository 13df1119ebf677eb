"""The parameters of a checkpoint one by one: shapes, types, norms."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

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
