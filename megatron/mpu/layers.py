"""Layers whose weight is cut along one axis of a process group.

t ranks of the group, i inputs, o outputs, v rows of the embedding, h hidden

Outside of a layer every rank holds the whole of what is not cut. With ``sequence_dim`` it holds its
part of the sequence, which is that dimension of the hidden states: [b, s/t, ..] where it is 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.mpu.initialization import WeightInit, mark_sharded, sharded_parameter, sum_gradient
from megatron.mpu.linear import linear
from megatron.mpu.mappings import (
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
)


def enter_region(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, sequence_dim: int | None
) -> Tensor:
    """x W^T + b at the entry of a tensor-parallel region, which takes x in whole on every rank, each its rows of W."""
    if sequence_dim is None:
        return linear(x, weight, bias, group)
    return linear(gather_from_sequence_parallel_region(x, group, sequence_dim), weight, bias)


def leave_region(x: Tensor, group: ProcessGroup, sequence_dim: int | None) -> Tensor:
    """The sum of what the ranks of a tensor-parallel region give, each its part."""
    if sequence_dim is None:
        return reduce_from_model_parallel_region(x, group)
    return reduce_scatter_to_sequence_parallel_region(x, group, sequence_dim)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W cut by rows of output: [.., i] -> [.., o/t], or [.., o] with ``gather_output``.

    ``activation(y, bias)`` replaces the sum where it can be fused with what follows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        init: WeightInit,
        gather_output: bool = False,
        activation: Callable[[Tensor, Tensor], Tensor] | None = None,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        self.group = group
        self.sequence_dim = sequence_dim
        self.gather_output = gather_output
        self.activation = activation
        self.weight = sharded_parameter(init.draw((output_size, input_size)), dim=0, group=group)
        self.bias = mark_sharded(nn.Parameter(torch.zeros(output_size // group.size())), dim=0)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            y = enter_region(x, self.weight, self.bias, self.group, self.sequence_dim)
        else:
            y = self.activation(enter_region(x, self.weight, None, self.group, self.sequence_dim), self.bias)
        return gather_from_model_parallel_region(y, self.group) if self.gather_output else y


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W cut by columns of input: [.., i/t] -> [.., o].

    With ``input_is_parallel=False`` the input is whole, [.., i], and is cut here.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: ProcessGroup,
        init: WeightInit,
        input_is_parallel: bool = True,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        self.group = group
        self.sequence_dim = sequence_dim
        self.input_is_parallel = input_is_parallel
        self.weight = sharded_parameter(init.draw((output_size, input_size)), dim=1, group=group)
        self.bias = nn.Parameter(torch.zeros(output_size))
        if sequence_dim is not None:
            sum_gradient(self.bias, group)

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        if self.group.size() == 1:
            return linear(x, self.weight, self.bias)
        return leave_region(linear(x, self.weight), self.group, self.sequence_dim) + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table cut by rows: tokens [b, s] -> hidden [b, s, h], and back to logits [b, s, v/t].

    ``padded_size`` rows are stored; those from ``num_embeddings`` on are zero and never looked up.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padded_size: int | None = None,
        group: ProcessGroup,
        init: WeightInit,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        self.group = group
        self.sequence_dim = sequence_dim
        whole = init.draw((num_embeddings, embedding_dim))  # before padding, which depends on the layout
        whole = F.pad(whole, (0, 0, 0, (padded_size or num_embeddings) - num_embeddings))
        self.rows = whole.size(0) // group.size()
        self.weight = sharded_parameter(whole, dim=0, group=group)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.rows * self.group.rank()
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return leave_region(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group, self.sequence_dim)

    def logits(self, hidden: Tensor) -> Tensor:
        """The table as the output projection: hidden [b, s, h] -> logits [b, s, v/t]."""
        return enter_region(hidden, self.weight, None, self.group, self.sequence_dim)
