"""The columns of a projection as heads, and back.

b batch, s sequence, n heads of queries of this rank, g of them with their own keys and values, d size of a head
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.config import ModelConfig
from megatron.parallel.tensor.mappings import gather_from_sequence_parallel_region


class Heads:
    """Columns [groups, heads of a group, d] of a column-parallel projection, for queries that share a key in groups.

    ``sizes`` are the heads of a group for each part: (queries, 1, 1) for query, key and value. A rank has entire
    groups, unless there are more ranks than groups. ``--shape-order SBH`` ends here: ``batch_first`` is for the core.
    """

    def __init__(self, config: ModelConfig, group: ProcessGroup, sizes: Sequence[int], groups: int):
        self.sizes, self.head_size, self.group = tuple(sizes), config.head_size, group
        self.columns = groups * sum(sizes) * config.head_size
        self.ranks_per_group = max(group.size() // groups, 1)
        self.is_sequence_first = config.sequence_dim == 0
        # A part that is a view keeps the columns of all parts for the backward pass. Queries that share a key are
        # copied by ``flatten`` in any case; what is only rotated is not kept.
        is_grouped, is_kept = max(sizes) > 1, config.qk_layernorm or not config.has_rotary_embedding
        query, key, value = self.ranks_per_group > 1 and is_kept, is_grouped and is_kept, is_grouped or not is_kept
        self.contiguous = (query, key, value) if len(self.sizes) == 3 else (False,) * len(self.sizes)

    def split(self, columns: Tensor) -> tuple[Tensor, ...]:
        """columns [b, s, columns of this rank] -> [b, s, n, d] for queries, [b, s, g, d] for keys and for values."""
        if self.ranks_per_group > 1:  # each rank has some of a group's columns, and needs its key and value, too
            columns = gather_from_sequence_parallel_region(columns, self.group, -1)
        groups = columns.unflatten(-1, (-1, sum(self.sizes), self.head_size))
        if self.ranks_per_group > 1:
            groups = groups.narrow(2, self.group.rank() // self.ranks_per_group, 1)
        if max(self.sizes) == 1:
            parts = groups.unbind(3)
        else:
            parts = tuple(part.flatten(2, 3) for part in groups.split(self.sizes, dim=3))
        if self.ranks_per_group > 1:
            query, *others = parts
            parts = (query.chunk(self.ranks_per_group, 2)[self.group.rank() % self.ranks_per_group], *others)
        return tuple(
            part.contiguous() if is_copied else part for part, is_copied in zip(parts, self.contiguous, strict=True)
        )

    def batch_first(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """[b, s, n, d], or [s, b, n, d], each -> [b, n, s, d]."""
        if self.is_sequence_first:
            return tuple(part.permute(1, 2, 0, 3) for part in parts)
        return tuple(part.transpose(1, 2) for part in parts)

    def merge(self, context: Tensor) -> Tensor:
        """context [b, n, s, d] -> [b, s, n d], or [s, b, n d]."""
        return context.permute((2, 0, 1, 3) if self.is_sequence_first else (0, 2, 1, 3)).flatten(2)
