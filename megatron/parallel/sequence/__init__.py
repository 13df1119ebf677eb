"""Parallelism along the sequence: operations on tensors whose sequence dimension is sharded.

Two groups may shard the sequence: the sequence group, and within its shards the tensor group, which shards
whatever it does not shard otherwise (Megatron's sequence parallelism, arXiv 2205.05198). The sequence group
consists of rings, whose ranks see one another's keys and values (``ring``, arXiv 2310.01889), of groups that
exchange parts of the sequence for heads around attention (DeepSpeed-Ulysses, arXiv 2309.14509), or of both:
then each rank of a ring is such a group.

b batch, s sequence, or this rank's shard of it, h hidden, n heads, d size of a head, t ranks of the group
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.config import ModelConfig
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence.ring import zigzag
from megatron.parallel.tensor.mappings import (
    copy_to_model_parallel_region,
    mapped,
    reduce_from_model_parallel_region,
    scatter_to_sequence_parallel_region,
)


def sequence_parallel_dim(config: ModelConfig, layout: ParallelLayout) -> int | None:
    """The dimension along which the tensor group shards hidden states; None without sequence parallelism.

    Sharded they are [b, s/t, h], or [s/t, b, h] for ``--shape-order SBH``.
    """
    return config.sequence_dim if layout.sequence_parallel else None


def sequence_groups(layout: ParallelLayout) -> list[ProcessGroup]:
    """The groups that shard the sequence, in the order in which they do."""
    tensor_group = layout.tensor_group if layout.sequence_parallel else None
    return [group for group in (layout.sequence_group, tensor_group) if group is not None]


def sequence_shard(x: Tensor, layout: ParallelLayout, dim: int, *, of_tensor_group: bool = False) -> Tensor:
    """This rank's shard of ``x`` along ``dim``, the sequence; all of ``x`` if nothing shards it.

    With ``of_tensor_group`` it is the tensor group's shard of that. Without gradient.
    """
    if layout.ring_group:
        x = zigzag(x, layout.ring_group, dim)
    for group in (layout.ulysses_group, layout.tensor_group if of_tensor_group and layout.sequence_parallel else None):
        if group:
            x = scatter_to_sequence_parallel_region(x, group, dim)
    return x


def first_token(hidden: Tensor, layout: ParallelLayout, dim: int) -> Tensor:
    """hidden [b, s, h], complete or sharded along ``dim`` -> the sequence's first token [b, h], on every rank."""
    first = hidden.select(dim, 0)
    for group in sequence_groups(layout):
        first = reduce_from_model_parallel_region(first * (group.rank() == 0), group)
    if layout.sequence_group:  # averages gradients: the rank that holds the token needs the sum of all ranks'
        first = copy_to_model_parallel_region(first, layout.sequence_group)
    return first


def all_to_all(x: Tensor, group: ProcessGroup, *, split_dim: int, concat_dim: int) -> Tensor:
    """Send the n-th part of ``split_dim`` to rank n, and concatenate what is received along ``concat_dim``.

    Backward is the same with both dimensions swapped. For heads [b, n, s/t, d] with ``split_dim=1, concat_dim=2``
    each rank receives a part of the heads for the entire sequence, [b, n/t, s, d] (arXiv 2309.14509).
    """
    forward = partial(_all_to_all, split_dim=split_dim, concat_dim=concat_dim)
    return mapped(x, group, forward, partial(_all_to_all, split_dim=concat_dim, concat_dim=split_dim))


def _all_to_all(x: Tensor, group: ProcessGroup, split_dim: int, concat_dim: int) -> Tensor:
    sent = torch.stack(x.chunk(group.size(), split_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), concat_dim)
