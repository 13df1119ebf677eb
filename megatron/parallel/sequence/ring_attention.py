"""Ring attention: attention over a sequence that is sharded over a ring of ranks (context parallelism).

b batch, n query heads, g key and value heads, s sequence, R ranks of the ring, c = s/2R tokens of a chunk, d size of a
head
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.ops.choices import chunk_size
from megatron.ops.packed_attention import chunk_mask, document_lengths, short_together
from megatron.ops.partial_attention import PartialAttention, merge
from megatron.parallel import steps_within
from megatron.parallel.sequence import chunks_of, gradient_of_each_rank, of_each_rank


class Block(NamedTuple):
    """A block of scores computed in one kernel call: queries of this rank and keys of one rank."""

    queries: slice
    keys: slice
    limit: Literal["none", "causal", "window", "documents"] = "none"
    """Keys that a query attends to: all; those up to itself (causal, for equal tokens); or according to a mask, for a
    window or for short documents."""
    rows: range = range(0)
    """Positions of the queries in the sequence, if there is a mask."""
    columns: range = range(0)
    """Positions of the keys in the sequence, if there is a mask."""


Index = tuple[slice, slice, slice]
"""Samples, heads and tokens of a block."""


@dataclass(frozen=True)
class RingAttention:
    """Attention of this rank's tokens to the entire sequence: [b, n, s/R, d], 2 x [b, g, s/R, d] -> [b, n, s/R, d].

    ``causal`` attention is limited to earlier tokens, at most ``window`` back. Segment ids of the entire sequence, int
    [b, s], limit a token to its own segment. No mask is larger than a window chunk, as on one rank, and blocks without
    visible keys are skipped, as are steps of the ring that are useless on all ranks.
    """

    group: ProcessGroup
    gathers: bool
    """Whether keys and values are all-gathered instead of passed around the ring."""
    causal: bool
    window: int
    kernel: PartialAttention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        if segment_ids is not None and all(len(lengths) == 1 for lengths in document_lengths(segment_ids)):
            segment_ids = None
        return _RingAttention.apply(query, key, value, segment_ids, self)

    def steps(self, length: int, segment_ids: Tensor | None) -> Sequence[int]:
        """The steps of the ring in which some rank needs the keys; ``length`` is s/R."""
        size, chunk = self.group.size(), length // 2
        apart = -(-self.window // chunk) if self.causal else 2 * size
        if segment_ids is not None:
            apart = min(apart, max(_most_apart(lengths, chunk) for lengths in document_lengths(segment_ids)))
        return steps_within(size, apart, self.causal)

    def blocks(
        self, source: int, query: Tensor, segment_ids: Tensor | None, seed: int
    ) -> Iterator[tuple[Index, Index, tuple[Tensor | None, bool, int]]]:
        """(queries, keys, options) of each block of this rank's queries and the keys of rank ``source``.

        Options are the last arguments of the kernel: mask, whether it is causal, and its seed, derived from ``seed``.
        """
        ranks = self.group.rank(), source, self.group.size(), query.size(2) // 2, self.causal, self.window
        parts: list[tuple[slice, Tensor | None, Sequence[int]]] = [(slice(None), None, ())]
        if segment_ids is not None:
            lengths = document_lengths(segment_ids)
            parts = [(slice(n, n + 1), segment_ids[n], documents) for n, documents in enumerate(lengths)]
        blocks = ((samples, ids, block) for samples, ids, each in parts for block in attending(*ranks, each))
        for number, (samples, ids, block) in enumerate(blocks):
            options = self.mask(block, ids, query), block.limit == "causal", _block_seed(seed, source, number)
            yield (samples, slice(None), block.queries), (samples, slice(None), block.keys), options

    def mask(self, block: Block, ids: Tensor | None, query: Tensor) -> Tensor | None:
        """The mask [q, k] of ``block``, boolean or additive, or None. ``ids`` [s] are the sample's segment ids."""
        rows, columns = block.rows, block.columns
        if block.limit == "window":
            chunk = chunk_size(self.window)
            begin = columns.start - rows.start + self.window
            mask = chunk_mask(chunk, min(self.window, chunk - 1), query.dtype, query.device)
            return mask[: len(rows), begin : begin + len(columns)]
        if block.limit != "documents":
            return None
        assert ids is not None
        visible = ids[rows.start : rows.stop].unsqueeze(-1) == ids[columns.start : columns.stop]
        if self.causal:  # token rows.start + i attends to columns.start + j if that is not later and within the window
            offset = rows.start - columns.start
            visible = visible.tril(offset).triu(offset - self.window)
        return visible


def attending(
    rank: int, source: int, size: int, chunk: int, causal: bool, window: int, lengths: Sequence[int] = ()
) -> Iterator[Block]:
    """The blocks for queries of ``rank`` and keys of ``source``, which both have two chunks of ``chunk`` tokens.

    ``lengths`` of documents limit attention to a document. Without documents and window, causal attention is one block:
    all queries attend to the first chunk of an earlier rank and not to its second chunk; the queries of the second
    chunk attend to both chunks of a later rank.
    """
    first, second, both = slice(0, chunk), slice(chunk, 2 * chunk), slice(0, 2 * chunk)
    if not lengths and (not causal or window >= 2 * size * chunk - 1):
        if not causal or source == rank:
            yield Block(both, both, "causal" if causal else "none")
        else:
            yield Block(both, first) if source < rank else Block(second, both)
        return
    begin = 0
    for documents in short_together(lengths or [2 * size * chunk]):
        tokens = range(begin, begin := begin + sum(documents))
        for query_chunk in chunks_of(rank, size):
            rows = _intersection(tokens, _tokens(query_chunk, chunk))
            for key_chunk in chunks_of(source, size) if rows else ():
                columns = _intersection(tokens, _tokens(key_chunk, chunk))
                for block in _blocks(rows, columns, causal, window, len(documents)) if columns else ():
                    yield block._replace(
                        queries=_local_slice(block.rows, rank, size, chunk),
                        keys=_local_slice(block.columns, source, size, chunk),
                    )


def _blocks(rows: range, columns: range, causal: bool, window: int, documents: int) -> Iterator[Block]:
    """The blocks for ``rows`` and ``columns``, each within a chunk and within one document or several short ones."""
    everything = slice(None)
    if causal and (rows.stop <= columns.start or rows.start - columns[-1] > window):
        return
    if documents > 1:
        yield Block(everything, everything, "documents", rows, columns)
    elif not causal or rows[-1] - columns[0] <= window:
        yield Block(everything, everything, "causal" if causal and rows == columns else "none", rows, columns)
    else:
        yield from (Block(everything, everything, *block) for block in _in_window(rows, columns, window))


def _in_window(
    rows: range, columns: range, window: int
) -> Iterator[tuple[Literal["none", "causal", "window"], range, range]]:
    """(limit, rows, columns) of the blocks within a window, for chunks of rows.

    Only the edge of the window needs a mask; a window shorter than a chunk is masked entirely.
    """
    chunk = chunk_size(window)
    for begin in range(rows.start, min(rows.stop, columns.stop + window), chunk):
        chunk_rows = range(begin, min(begin + chunk, rows.stop, columns.stop + window))
        if window < chunk:
            if near := _intersection(columns, range(begin - window, chunk_rows.stop)):
                yield "window", chunk_rows, near
            continue
        if edge := _intersection(columns, range(begin - window, begin - window + chunk)):
            yield "window", chunk_rows, edge
        if between := _intersection(columns, range(begin - window + chunk, begin)):
            yield "none", chunk_rows, between
        if _intersection(columns, chunk_rows):
            yield "causal", chunk_rows, chunk_rows


def _intersection(first: range, second: range) -> range:
    """The intersection of two ranges."""
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _tokens(number: int, chunk: int) -> range:
    """Positions of the tokens of chunk ``number``."""
    return range(number * chunk, (number + 1) * chunk)


def _local_slice(tokens: range, rank: int, size: int, chunk: int) -> slice:
    """Indices of these tokens, which lie within one chunk, in the shard of ``rank``."""
    number = tokens.start // chunk
    begin = tokens.start % chunk + chunk * chunks_of(rank, size).index(number)
    return slice(begin, begin + len(tokens))


def _most_apart(lengths: Sequence[int], chunk: int) -> int:
    """Maximum number of chunks between the first and the last token of a block of documents."""
    begin, most = 0, 0
    for documents in short_together(lengths):
        end = begin + sum(documents)
        most, begin = max(most, (end - 1) // chunk - begin // chunk), end
    return most


class _RingAttention(torch.autograd.Function):
    """Autograd function of ring attention; contexts and gradients are accumulated in fp32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, ring: RingAttention
    ) -> Tensor:
        ctx.ring, ctx.seed = ring, _draw_seed(query.device) if ring.kernel.dropout else 0
        b, n, length, d = query.shape
        context = query.new_zeros(b, length, n, d, dtype=torch.float32).transpose(1, 2)  # memory order of the output
        logsumexp = context.new_full(query.shape[:3], -torch.inf)
        steps = ring.steps(query.size(2), segment_ids)
        sources = of_each_rank(torch.stack([key, value]), ring.group, gathers=ring.gathers, steps=steps)
        for source, (keys, values) in sources:
            for rows, columns, options in ring.blocks(source, query, segment_ids, ctx.seed):
                part = ring.kernel.forward(query[rows], keys[columns], values[columns], *options)
                merge(context[rows], logsumexp[rows], *part)
        context = context.to(query.dtype)
        ctx.save_for_backward(query, key, value, context, logsumexp, segment_ids)
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, context, logsumexp, segment_ids = ctx.saved_tensors
        ring, query_grad = ctx.ring, torch.zeros_like(query, dtype=torch.float32)

        def contribution(source: int, keys_values: Tensor) -> Tensor:
            total = torch.zeros_like(keys_values, dtype=torch.float32)
            keys, values = keys_values
            for rows, columns, options in ring.blocks(source, query, segment_ids, ctx.seed):
                block = grad[rows], query[rows], keys[columns], values[columns], context[rows], logsumexp[rows]
                sums = query_grad[rows], total[0][columns], total[1][columns]
                for gradient, block_gradient in zip(sums, ring.kernel.backward(*block, *options), strict=True):
                    gradient.add_(block_gradient)
            return total

        key_grad, value_grad = gradient_of_each_rank(
            torch.stack([key, value]),
            ring.group,
            contribution,
            gathers=ring.gathers,
            steps=ring.steps(query.size(2), segment_ids),
        )
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _draw_seed(device: torch.device) -> int:
    """A seed from the dropout stream, the same in recomputation; does not wait for the device."""
    state = get_accelerator().get_rng_state().numpy().tobytes()  # is in host memory
    torch.rand((), device=device)  # advances the stream
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 2


def _block_seed(seed: int, source: int, number: int) -> int:
    """The dropout seed of block ``number`` with the keys of rank ``source``."""
    return seed + (source << 32) + number
