"""Layers whose weight is cut along one axis of a process group.

t ranks of the group, i inputs, o outputs, v rows of the embedding, h hidden
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.mpu.initialization import WeightInit, mark_sharded, sharded_parameter
from megatron.mpu.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    reduce_from_model_parallel_region,
    scatter_to_model_parallel_region,
)


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
    ):
        super().__init__()
        self.group = group
        self.gather_output = gather_output
        self.activation = activation
        self.weight = sharded_parameter(init.draw((output_size, input_size)), dim=0, group=group)
        self.bias = mark_sharded(nn.Parameter(torch.zeros(output_size // group.size())), dim=0)

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to_model_parallel_region(x, self.group)
        if self.activation is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = self.activation(F.linear(x, self.weight), self.bias)
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
    ):
        super().__init__()
        self.group = group
        self.input_is_parallel = input_is_parallel
        self.weight = sharded_parameter(init.draw((output_size, input_size)), dim=1, group=group)
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, x: Tensor) -> Tensor:
        if not self.input_is_parallel:
            x = scatter_to_model_parallel_region(x, self.group)
        return reduce_from_model_parallel_region(F.linear(x, self.weight), self.group) + self.bias


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
    ):
        super().__init__()
        self.group = group
        whole = init.draw((num_embeddings, embedding_dim))  # before padding, which depends on the layout
        whole = F.pad(whole, (0, 0, 0, (padded_size or num_embeddings) - num_embeddings))
        self.rows = whole.size(0) // group.size()
        self.weight = sharded_parameter(whole, dim=0, group=group)

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.rows * self.group.rank()
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_model_parallel_region(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """The table as the output projection: hidden [b, s, h] -> logits [b, s, v/t]."""
        return F.linear(copy_to_model_parallel_region(hidden, self.group), self.weight)
