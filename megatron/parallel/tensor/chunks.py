"""Matmuls in chunks of the sequence, which overlap the communication of one chunk with the matmul of another.

b batch, s sequence, c chunk of a rank's shard of the sequence, i inputs, o outputs, t ranks of the group, r rows: b x s
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.tensor.mappings import async_all_gather, async_all_reduce, async_reduce_scatter

CHUNKS = 4
"""Chunks of a matmul with ``--tp-comm-overlap``; only the first all-gather or last reduction is not overlapped."""

BY_RANK = 0
"""Value for a number of chunks that selects torch's symmetric-memory matmuls, with a chunk for each rank."""

Multiply = Callable[[Tensor], Tensor]
"""[.., i] -> [.., o]"""
Encoded = tuple[Tensor, ...]
"""Tensors [.., n] to all-gather instead of inputs [.., i], such as quantized ones."""


def gather_and_multiply(
    x: Tensor,
    encode: Callable[[Tensor], Encoded],
    multiply: Callable[[Encoded], Tensor],
    group: ProcessGroup,
    dim: int,
    *,
    outputs: int,
    chunks: int,
) -> Tensor:
    """All-gather along ``dim``, then matmul, in chunks: [b, s/t, i] -> [b, s, o] for ``dim`` 1."""
    parts = x.chunk(chunks, dim)
    requested = [[async_all_gather(tensor.unsqueeze(0), group, 0) for tensor in encode(part)] for part in parts]
    shape = [*x.shape[:-1], outputs]
    shape[dim] *= group.size()
    y = x.new_empty(shape)
    by_rank = y.unflatten(dim, (group.size(), -1)).movedim(dim, 0)  # [t, b, s/t, o]
    targets = by_rank.split([part.size(dim) for part in parts], dim + 1)
    for target, gathered in zip(targets, requested, strict=True):
        target.copy_(multiply(tuple(wait() for wait in gathered)))  # [t, b, c, o]
    return y


def multiply_and_scatter(x: Tensor, multiply: Multiply, group: ProcessGroup, dim: int, *, chunks: int) -> Tensor:
    """Matmul, then reduce-scatter along ``dim``, in chunks: [b, s, i] -> [b, s/t, o] for ``dim`` 1."""
    by_rank = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0)  # [t, b, s/t, i]
    sums = [async_reduce_scatter(multiply(part), group, 0) for part in by_rank.chunk(chunks, dim + 1)]
    return torch.cat([summed().squeeze(0) for summed in sums], dim)


def multiply_and_reduce(x: Tensor, multiply: Multiply, group: ProcessGroup, *, chunks: int) -> Tensor:
    """Matmul, then all-reduce, in chunks: [b, s, i] -> [b, s, o]."""
    sums = [async_all_reduce(multiply(rows), group) for rows in x.flatten(0, -2).chunk(chunks)]  # [r, i]
    return torch.cat([summed() for summed in sums]).view(*x.shape[:-1], -1)
