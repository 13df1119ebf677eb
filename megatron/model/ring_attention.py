"""Attention over a sequence that a ring of ranks shards (context parallelism).

b batch, n heads of queries, g heads of keys and values, s sequence, R ranks of the ring, c = s/2R tokens of a chunk,
d size of a head
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.model.partial_attention import PartialAttention, merge
from megatron.parallel.sequence.ring import chunks_of, gradient_of_each_rank, of_each_rank, zigzag


class Block(NamedTuple):
    """Queries of this rank and keys of another, or of this one, of which some attend to some."""

    queries: slice
    keys: slice
    is_causal: bool = False
    """Whether both are the same tokens, and each attends to those up to itself."""
    is_limited: bool = False
    """Whether a mask says who attends to whom: within documents, or within a window."""


@dataclass(frozen=True)
class RingAttention:
    """[b, n, s/R, d], [b, g, s/R, d] twice -> [b, n, s/R, d]: attention of this rank's tokens to those of all ranks.

    ``causal`` attention is limited to earlier tokens, at most ``window`` back. The call takes the segment ids of the
    whole sequence, int [b, s], if a token attends to its own segment only.
    """

    group: ProcessGroup
    gathers: bool
    """Whether keys and values are gathered at once, instead of passed around."""
    causal: bool
    window: int
    kernel: PartialAttention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        return _RingAttention.apply(query, key, value, segment_ids, self)

    def blocks(
        self, source: int, length: int, segment_ids: Tensor | None, device: torch.device
    ) -> Iterator[tuple[Block, Tensor | None]]:
        """Those of this rank's queries and the keys of rank ``source``, with their masks; ``length`` is s/R."""
        rank, size = self.group.rank(), self.group.size()
        for block in attending(
            rank, source, size, length // 2, self.causal, self.window, keeps_apart=segment_ids is not None
        ):
            if not block.is_limited:
                yield block, None
                continue
            seen = self._seen(block, source, length, segment_ids, device)
            if device.type != "cpu":  # others would have to wait for the answer
                yield block._replace(is_causal=False), seen
            elif seen.any():
                yield block._replace(is_causal=False), None if seen.all() else seen

    def _seen(self, block: Block, source: int, length: int, segment_ids: Tensor | None, device: torch.device) -> Tensor:
        """Whether each query of ``block`` attends to each of its keys: [c, c] or [b, 1, c, c]."""
        size, chunk = self.group.size(), length // 2
        rows = _tokens(block.queries, chunks_of(self.group.rank(), size), chunk)
        columns = _tokens(block.keys, chunks_of(source, size), chunk)
        seen = torch.ones(chunk, chunk, dtype=torch.bool, device=device)
        if self.causal:  # token rows.start + i attends to columns.start + j if that is not later, and near
            offset = rows.start - columns.start
            seen = seen.tril(offset).triu(offset - self.window)
        if segment_ids is not None:
            same = segment_ids[:, rows].unsqueeze(-1) == segment_ids[:, columns].unsqueeze(-2)
            seen = seen & same.unsqueeze(1)
        return seen


def attending(
    rank: int, source: int, size: int, chunk: int, causal: bool, window: int, *, keeps_apart: bool
) -> list[Block]:
    """The blocks of queries of ``rank`` and keys of ``source``, each with two chunks of so many tokens.

    Without documents or a window that reaches less far, causal attention is one block: each query of a rank attends
    to the first chunk of an earlier rank and to none of its second one, and each query of the second chunk to both
    chunks of a later rank.
    """
    first, second, both = slice(0, chunk), slice(chunk, 2 * chunk), slice(0, 2 * chunk)
    reaches_all = not causal or window >= 2 * size * chunk - 1
    if reaches_all and not keeps_apart:
        if not causal or source == rank:
            return [Block(both, both, is_causal=causal)]
        return [Block(both, first)] if source < rank else [Block(second, both)]
    blocks = []
    for queries, of_query in zip((first, second), chunks_of(rank, size), strict=True):
        for keys, of_key in zip((first, second), chunks_of(source, size), strict=True):
            apart = of_query - of_key
            nearest, farthest = (apart - 1) * chunk + 1, (apart + 1) * chunk - 1
            if not causal or (apart >= 0 and nearest <= window):
                is_limited = keeps_apart or (causal and farthest > window)
                blocks.append(Block(queries, keys, causal and not apart, is_limited))
    return blocks


def _tokens(part: slice, chunks: tuple[int, int], chunk: int) -> slice:
    """Which tokens of the sequence one of a rank's two chunks is."""
    begin = chunks[part.start // chunk] * chunk
    return slice(begin, begin + chunk)


class _RingAttention(torch.autograd.Function):
    """Contexts are merged, and gradients added up, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, ring: RingAttention
    ) -> Tensor:
        ctx.ring, ctx.seed = ring, _draw_seed(query.device) if ring.kernel.dropout else 0
        context = torch.zeros_like(query, dtype=torch.float32, memory_format=torch.contiguous_format)
        logarithms = context.new_full(query.shape[:3], -torch.inf)
        for source, (keys, values) in of_each_rank(torch.stack([key, value]), ring.group, gathers=ring.gathers):
            for number, (block, seen) in enumerate(ring.blocks(source, query.size(2), segment_ids, query.device)):
                rows, columns = (slice(None), slice(None), block.queries), (slice(None), slice(None), block.keys)
                part = ring.kernel.forward(
                    query[rows], keys[columns], values[columns], seen, block.is_causal, ctx.seed + 4 * source + number
                )
                merge(context[rows], logarithms[rows], *part)
        context = context.to(query.dtype)
        ctx.save_for_backward(query, key, value, context, logarithms, segment_ids)
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, logarithms, segment_ids = ctx.saved_tensors
        ring, of_query = ctx.ring, torch.zeros_like(query, dtype=torch.float32)

        def contribution(source: int, keys_values: Tensor) -> Tensor:
            total = torch.zeros_like(keys_values, dtype=torch.float32)
            keys, values = keys_values
            for number, (block, seen) in enumerate(ring.blocks(source, query.size(2), segment_ids, query.device)):
                rows, columns = (slice(None), slice(None), block.queries), (slice(None), slice(None), block.keys)
                of_rows = (tensor[rows] for tensor in (grad, query))
                found = ring.kernel.backward(
                    *of_rows,
                    keys[columns],
                    values[columns],
                    context[rows],
                    logarithms[rows],
                    seen,
                    block.is_causal,
                    ctx.seed + 4 * source + number,
                )
                for gradient, of_block in zip(
                    (of_query[rows], total[0][columns], total[1][columns]), found, strict=True
                ):
                    gradient.add_(of_block)
            return total

        of_key, of_value = gradient_of_each_rank(
            torch.stack([key, value]), ring.group, contribution, gathers=ring.gathers
        )
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _draw_seed(device: torch.device) -> int:
    """Of the stream that dropout draws from, so that recomputation draws the same."""
    return int(torch.randint(2**62, (), device=device))


def tables_of_ring(tables: tuple[Tensor, Tensor], group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions [b, 1, s, r/2] -> those of this rank's tokens [b, 1, s/R, r/2]."""
    cosines, sines = (zigzag(table, group, 2) for table in tables)
    return cosines, sines
