"""Attention over a sequence that a ring of ranks shards (context parallelism).

b batch, n heads of queries, g heads of keys and values, s sequence, R ranks of the ring, c = s/2R tokens of a chunk,
d size of a head
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
    """Queries of this rank and keys of another, or of this one, that one call of the kernel is for."""

    queries: slice
    keys: slice
    limit: Literal["none", "causal", "window", "documents"] = "none"
    """Which keys a query attends to: all; those up to itself, where both are the same tokens; or those that a mask
    says, of a window or of short documents."""
    rows: range = range(0)
    """Which tokens of the sequence the queries are, where there is a mask."""
    columns: range = range(0)
    """The same of the keys."""


@dataclass(frozen=True)
class RingAttention:
    """[b, n, s/R, d], [b, g, s/R, d] twice -> [b, n, s/R, d]: attention of this rank's tokens to all tokens.

    ``causal`` attention is limited to earlier tokens, at most ``window`` back. The call takes the segment ids of the
    entire sequence, int [b, s], if a token attends to its own segment only. The largest mask is for a chunk of a
    window, as of attention on one rank, and keys that no query attends to are not computed with. A step of the ring
    that brings no rank a key that it attends to is left out; with ``gathers`` the keys of all ranks come at once.
    """

    group: ProcessGroup
    gathers: bool
    """Whether keys and values are gathered at once, instead of passed around."""
    causal: bool
    window: int
    kernel: PartialAttention

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None = None) -> Tensor:
        if segment_ids is not None and all(len(lengths) == 1 for lengths in document_lengths(segment_ids)):
            segment_ids = None
        return _RingAttention.apply(query, key, value, segment_ids, self)

    def steps(self, length: int, segment_ids: Tensor | None) -> Sequence[int]:
        """Those that bring keys of other ranks; ``length`` is s/R."""
        size, chunk = self.group.size(), length // 2
        apart = -(-self.window // chunk) if self.causal else 2 * size
        if segment_ids is not None:
            apart = min(apart, max(_most_apart(lengths, chunk) for lengths in document_lengths(segment_ids)))
        return steps_within(size, apart, self.causal)

    def blocks(
        self, source: int, query: Tensor, segment_ids: Tensor | None
    ) -> Iterator[tuple[slice, Block, Tensor | None]]:
        """(samples, a block of this rank's queries and the keys of rank ``source``, its mask)."""
        ranks = self.group.rank(), source, self.group.size(), query.size(2) // 2, self.causal, self.window
        if segment_ids is None:
            yield from ((slice(None), block, self.mask(block, None, query)) for block in attending(*ranks))
            return
        for sample, lengths in enumerate(document_lengths(segment_ids)):
            for block in attending(*ranks, lengths):
                yield slice(sample, sample + 1), block, self.mask(block, segment_ids[sample], query)

    def mask(self, block: Block, ids: Tensor | None, query: Tensor) -> Tensor | None:
        """Whether each query of ``block`` attends to each of its keys, or what is added to its scores [q, k].

        ``ids`` [s] are the segment ids of a sample.
        """
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
        if self.causal:  # token rows.start + i attends to columns.start + j if that is not later, and near
            offset = rows.start - columns.start
            visible = visible.tril(offset).triu(offset - self.window)
        return visible


def attending(
    rank: int, source: int, size: int, chunk: int, causal: bool, window: int, lengths: Sequence[int] = ()
) -> Iterator[Block]:
    """The blocks of queries of ``rank`` and keys of ``source``, each with two chunks of ``chunk`` tokens.

    ``lengths`` of documents limit attention to a document. Without them, or a window that reaches less far, causal
    attention is one block: each query of a rank attends to the first chunk of an earlier rank and to none of its second
    one, and each query of the second chunk to both chunks of a later rank.
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
        for of_query in chunks_of(rank, size):
            rows = _common(tokens, _tokens(of_query, chunk))
            for of_key in chunks_of(source, size) if rows else ():
                columns = _common(tokens, _tokens(of_key, chunk))
                for block in _blocks(rows, columns, causal, window, len(documents)) if columns else ():
                    yield block._replace(
                        queries=_of_rank(block.rows, rank, size, chunk),
                        keys=_of_rank(block.columns, source, size, chunk),
                    )


def _blocks(rows: range, columns: range, causal: bool, window: int, documents: int) -> Iterator[Block]:
    """The blocks of ``rows`` and ``columns``, each a part of a chunk, of one document or of several short ones."""
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
    """Limit, rows and columns of each block, in chunks of rows, of which each attends to some of the columns.

    Only the edge of the window needs a mask, or all of a short window.
    """
    chunk = chunk_size(window)
    for begin in range(rows.start, min(rows.stop, columns.stop + window), chunk):
        some = range(begin, min(begin + chunk, rows.stop, columns.stop + window))
        if window < chunk:
            if near := _common(columns, range(begin - window, some.stop)):
                yield "window", some, near
            continue
        if edge := _common(columns, range(begin - window, begin - window + chunk)):
            yield "window", some, edge
        if between := _common(columns, range(begin - window + chunk, begin)):
            yield "none", some, between
        if _common(columns, some):
            yield "causal", some, some


def _common(one: range, other: range) -> range:
    """The numbers that are in both."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _tokens(number: int, chunk: int) -> range:
    """The tokens of a chunk of the sequence."""
    return range(number * chunk, (number + 1) * chunk)


def _of_rank(tokens: range, rank: int, size: int, chunk: int) -> slice:
    """Where a rank has these tokens of one of its chunks."""
    number = tokens.start // chunk
    begin = tokens.start % chunk + chunk * chunks_of(rank, size).index(number)
    return slice(begin, begin + len(tokens))


def _most_apart(lengths: Sequence[int], chunk: int) -> int:
    """How many chunks the first and the last token of a document, or of short ones in a call, are apart at most."""
    begin, most = 0, 0
    for documents in short_together(lengths):
        end = begin + sum(documents)
        most, begin = max(most, (end - 1) // chunk - begin // chunk), end
    return most


class _RingAttention(torch.autograd.Function):
    """Contexts are merged, and gradients added up, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, ring: RingAttention
    ) -> Tensor:
        ctx.ring, ctx.seed = ring, _draw_seed(query.device) if ring.kernel.dropout else 0
        b, n, length, d = query.shape
        context = query.new_zeros(b, length, n, d, dtype=torch.float32).transpose(1, 2)  # as its user needs it
        logsumexp = context.new_full(query.shape[:3], -torch.inf)
        steps = ring.steps(query.size(2), segment_ids)
        sources = of_each_rank(torch.stack([key, value]), ring.group, gathers=ring.gathers, steps=steps)
        for source, (keys, values) in sources:
            for number, (samples, block, mask) in enumerate(ring.blocks(source, query, segment_ids)):
                rows, columns = (samples, slice(None), block.queries), (samples, slice(None), block.keys)
                of_block = mask, block.limit == "causal", _seed_of(ctx.seed, source, number)
                part = ring.kernel.forward(query[rows], keys[columns], values[columns], *of_block)
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
            for number, (samples, block, mask) in enumerate(ring.blocks(source, query, segment_ids)):
                rows, columns = (samples, slice(None), block.queries), (samples, slice(None), block.keys)
                of_rows = (tensor[rows] for tensor in (grad, query))
                grads = ring.kernel.backward(
                    *of_rows,
                    keys[columns],
                    values[columns],
                    context[rows],
                    logsumexp[rows],
                    mask,
                    block.limit == "causal",
                    _seed_of(ctx.seed, source, number),
                )
                for gradient, of_block in zip(
                    (query_grad[rows], total[0][columns], total[1][columns]), grads, strict=True
                ):
                    gradient.add_(of_block)
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
    """Of the stream that dropout draws from, so that recomputation draws the same; without waiting for the device."""
    state = get_accelerator().get_rng_state().numpy().tobytes()  # the host has it
    torch.rand((), device=device)  # the stream moves on
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 2


def _seed_of(seed: int, source: int, number: int) -> int:
    """Of the dropout of one of the blocks of a rank's keys."""
    return seed + (source << 32) + number
