"""Low-rank adapters for tensor-parallel layers (LoRA, arXiv 2106.09685): y + scale x B(A(x)), with trained A and B.

t ranks of the group, i inputs, o outputs, r rank. Adapters communicate only the output of A, of size r.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from megatron.parallel.tensor.deferred import DeferringModule
from megatron.parallel.tensor.layers import WeightInit, all_reduce_gradient, reduce_output, sharded_parameter
from megatron.parallel.tensor.linear import linear, register_group
from megatron.parallel.tensor.random import random_stream

ADAPTER = "lora"
"""Name of the adapter module within its layer."""


@dataclass(frozen=True)
class LowRank:
    """Settings of all adapters of a model."""

    rank: int
    scale: float
    """Factor of the adapter's output: alpha / r."""
    dropout: float
    """Dropout probability of the adapter's input."""


class ParallelAdapter(DeferringModule):
    """LoRA adapter of a tensor-parallel layer: A is initialized like ``nn.Linear``, equal for all layouts, B with 0.

    For a column-parallel layer, [.., i] -> [.., parts x o/t], A [r, i] is replicated, and B [o, r] or [parts, o, r] is
    sharded along o. For a row-parallel layer, [.., i/t] -> [.., o], A is sharded along i, and B is replicated.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        is_column_parallel: bool,
        settings: LowRank,
        group: ProcessGroup,
        init: WeightInit,
        parts: int = 1,
        sequence_dim: int | None = None,
    ):
        super().__init__()
        self.is_column_parallel, self.settings = is_column_parallel, settings
        self.group, self.sequence_dim = register_group(group), sequence_dim
        a_init = replace(init, name=f"{init.name}.{ADAPTER}", std=1 / math.sqrt(3 * input_size))
        a, outputs = a_init.draw((settings.rank, input_size)), (output_size,) if parts == 1 else (parts, output_size)
        b = torch.zeros(*outputs, settings.rank)
        self.A = nn.Parameter(a) if is_column_parallel else sharded_parameter(a, dim=1, group=group)
        self.B = sharded_parameter(b, dim=len(outputs) - 1, group=group) if is_column_parallel else nn.Parameter(b)
        if sequence_dim is not None:  # each rank applies the replicated matrix to its shard of the sequence
            all_reduce_gradient(self.A if is_column_parallel else self.B, group)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.settings.dropout:
            with random_stream(per_rank=not self.is_column_parallel or self.sequence_dim is not None):
                x = F.dropout(x, self.settings.dropout)
        inner = linear(x, self.A, deferred=self.deferred) * self.settings.scale
        if self.is_column_parallel:
            return linear(inner, self.B.flatten(0, -2), None, self.group, self.sequence_dim, deferred=self.deferred)
        if self.group.size() > 1:
            inner = reduce_output(inner, self.group, self.sequence_dim)
        return linear(inner, self.B, deferred=self.deferred)
