"""Attention with the heads sharded over the tensor group: projections, and a core between them.

b batch, s sequence, h hidden, n heads of this rank, g of them with their own keys and values, d size of a head
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.config import ModelConfig
from megatron.model.attention_core import MaskedCore, attention_core
from megatron.model.rotary import RotaryPositions
from megatron.model.weights import column_parallel, head_norm_class, row_parallel
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.mappings import gather_from_sequence_parallel_region


class ParallelSelfAttention(nn.Module):
    """hidden [b, s, h] -> hidden [b, s, h], or [s, b, h] for ``--shape-order SBH``.

    With ``segment_ids`` [b, s] a token attends to its own segment only. ``causal`` attention is limited to earlier
    tokens, at most ``pre_tokens`` back; otherwise a token attends to its entire segment. The core of T5 gets a mask
    instead of segment ids.
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int, causal: bool = True):
        super().__init__()
        name, h, groups = f"layers.{layer_number}.attention", config.hidden_size, config.query_groups
        queries = config.num_attention_heads // groups
        self.heads = Heads(config, layout.tensor_group, (queries, 1, 1), groups)
        self.query_key_value = column_parallel(
            config, layout, f"{name}.query_key_value", h, self.heads.columns, has_bias=config.qkv_bias
        )
        norm = head_norm_class(config, layout) if config.qk_layernorm else nn.Identity
        self.q_layernorm = norm(config.head_size, eps=config.layernorm_epsilon)
        self.k_layernorm = norm(config.head_size, eps=config.layernorm_epsilon)
        self.rotary: nn.Module | None = RotaryPositions(config, layout) if config.has_rotary_embedding else None
        self.core = attention_core(config, layout, layer_number=layer_number, causal=causal)
        self.dense = row_parallel(config, layout, f"{name}.dense", config.num_attention_heads * config.head_size, h)

    def forward(self, hidden: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        query, key, value = self.heads.split(self.query_key_value(hidden))
        query, key, value = self.heads.batch_first(self.q_layernorm(query), self.k_layernorm(key), value)
        if self.rotary is not None:
            query, key = self.rotary(query, key, segment_ids)
        return self.dense(self.heads.merge(self.core(query, key, value, segment_ids)))


class CrossAttention(nn.Module):
    """hidden of the decoder [b, r, h], output of the encoder [b, s, h] and a mask -> hidden [b, r, h]."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout, *, layer_number: int):
        super().__init__()
        name, h, count = f"layers.{layer_number}.inter_attention", config.hidden_size, config.num_attention_heads
        self.query_heads = Heads(config, layout.tensor_group, (1,), count)
        self.key_value_heads = Heads(config, layout.tensor_group, (1, 1), count)
        self.query = column_parallel(config, layout, f"{name}.query", h, self.query_heads.columns)
        self.key_value: nn.Module = column_parallel(
            config, layout, f"{name}.key_value", h, self.key_value_heads.columns
        )
        self.core = MaskedCore(config)
        self.dense = row_parallel(config, layout, f"{name}.dense", self.query_heads.columns, h)

    def forward(self, hidden: Tensor, encoder_output: Tensor, mask: Tensor) -> Tensor:
        query = self.query_heads.split(self.query(hidden))
        key_value = self.key_value_heads.split(self.key_value(encoder_output))
        context = self.core(*self.key_value_heads.batch_first(*query, *key_value), mask)
        return self.dense(self.query_heads.merge(context))


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
