"""Low-rank adapters of tensor-parallel layers (LoRA, arXiv 2106.09685): y + scale x B(A(x)), with trained A and B.

t ranks of the group, i inputs, o outputs, r rank. A's output is as small as r, and all that these layers communicate.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.parallel.tensor.deferred import DeferringModule
from megatron.parallel.tensor.layers import (
    WeightInit,
    all_reduce_gradient,
    mark_sharded,
    reduce_output,
    sharded_parameter,
)
from megatron.parallel.tensor.linear import linear, register_group
from megatron.parallel.tensor.random import random_stream

ADAPTER = "lora"
"""Name of the adapter in the layer that it belongs to."""


@dataclass(frozen=True)
class LowRank:
    """Settings of all adapters of a model."""

    rank: int
    scale: float
    """What the adapter's output is multiplied by: alpha / r."""
    dropout: float
    """Of the adapter's input."""


class _Adapter(DeferringModule):
    """A, drawn as ``nn.Linear`` is, whatever the layout; and B, which is 0 at first."""

    A: nn.Parameter
    B: nn.Parameter
    input_is_sharded: bool

    def __init__(self, settings: LowRank, group: ProcessGroup, sequence_dim: int | None):
        super().__init__()
        self.settings, self.group, self.sequence_dim = settings, group, sequence_dim

    def drop(self, x: Tensor) -> Tensor:
        """The input with dropout, the same on all ranks if the input is."""
        if not (self.training and self.settings.dropout):
            return x
        with random_stream(per_rank=self.input_is_sharded):
            return F.dropout(x, self.settings.dropout)


class ColumnParallelAdapter(_Adapter):
    """[.., i] -> [.., parts x o/t]: A [r, i] is replicated, B [o, r] or [parts, o, r] sharded along o."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        settings: LowRank,
        group: ProcessGroup,
        init: WeightInit,
        parts: int = 1,
        sequence_dim: int | None = None,
    ):
        super().__init__(settings, group, sequence_dim)
        register_group(group)
        self.input_is_sharded = sequence_dim is not None
        self.A = nn.Parameter(_draw(init, settings.rank, input_size))
        if sequence_dim is not None:  # each rank applies it to its shard of the sequence
            all_reduce_gradient(self.A, group)
        more = () if parts == 1 else (parts,)
        self.B = mark_sharded(
            nn.Parameter(torch.zeros(*more, output_size // group.size(), settings.rank)), dim=len(more)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = linear(self.drop(x), self.A, deferred=self.deferred) * self.settings.scale
        return linear(inner, self.B.flatten(0, -2), None, self.group, self.sequence_dim, deferred=self.deferred)


class RowParallelAdapter(_Adapter):
    """[.., i/t] -> [.., o]: A [r, i] is sharded along i, B [o, r] replicated."""

    input_is_sharded = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        settings: LowRank,
        group: ProcessGroup,
        init: WeightInit,
        sequence_dim: int | None = None,
    ):
        super().__init__(settings, group, sequence_dim)
        self.A = sharded_parameter(_draw(init, settings.rank, input_size), dim=1, group=group)
        self.B = nn.Parameter(torch.zeros(output_size, settings.rank))
        if sequence_dim is not None:
            all_reduce_gradient(self.B, group)

    def forward(self, x: Tensor) -> Tensor:
        inner = linear(self.drop(x), self.A, deferred=self.deferred) * self.settings.scale
        if self.group.size() > 1:
            inner = reduce_output(inner, self.group, self.sequence_dim)
        return linear(inner, self.B, deferred=self.deferred)


def _draw(init: WeightInit, rank: int, inputs: int) -> Tensor:
    return replace(init, name=f"{init.name}.{ADAPTER}", std=1 / math.sqrt(3 * inputs)).draw((rank, inputs))


def train_adapters_only(module: nn.Module) -> None:
    """Freeze every parameter of ``module`` except adapters."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in name)
