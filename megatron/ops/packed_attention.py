"""Attention limited to documents and windows, without scores or a mask for the entire sequence.

b batch, s sequence, n query heads, g key and value heads, d size of a head
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from megatron.ops.choices import SHORTEST_BLOCK, chunk_size

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""core(query [b, n, q, d], key [b, g, k, d], value [b, g, k, d], mask) -> context [b, n, q, d]. A boolean ``mask``,
[q, k] or [b, 1, q, k], is True where a query attends to a key; others are added to the scores. Without a mask attention
is causal or bidirectional, like the model."""


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, window: int | None, core: Core
) -> Tensor:
    """Attention with a ``core`` call per document or window chunk: [b, n, s, d], 2 x [b, g, s, d] -> [b, n, s, d].

    A token attends to the ``window`` tokens before it, or to its entire document if that is None. A document is a run
    of equal ``segment_ids`` [b, s]; adjacent short documents share a masked call. No mask is larger than a chunk.
    """
    s = query.size(2)
    if s <= SHORTEST_BLOCK:
        return attend_with_mask(query, key, value, segment_ids, window, core)
    if segment_ids is None:
        return _in_window(query, key, value, core, window)
    samples = zip(*(tensor.split(1) for tensor in (query, key, value, segment_ids)), strict=True)
    contexts = []
    for (q, k, v, ids), lengths in zip(samples, document_lengths(segment_ids), strict=True):
        blocks = [*short_together(lengths)]
        sizes = [sum(block) for block in blocks]
        parts = zip(blocks, *(tensor.split(sizes, 2) for tensor in (q, k, v)), ids.split(sizes, 1), strict=True)
        of_blocks = [
            attend_with_mask(q, k, v, ids, window, core) if len(block) > 1 else _in_window(q, k, v, core, window)
            for block, q, k, v, ids in parts
        ]
        contexts.append(torch.cat(of_blocks, 2))
    return torch.cat(contexts)


def short_together(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group lengths of adjacent documents into blocks of up to SHORTEST_BLOCK tokens; longer documents stay alone."""
    block: list[int] = []
    for length in lengths:
        if block and sum(block) + length > SHORTEST_BLOCK:
            yield block
            block = []
        block.append(length)
    yield block


def _in_window(query: Tensor, key: Tensor, value: Tensor, core: Core, window: int | None) -> Tensor:
    """Attention within one document, in chunks if it is longer than the window.

    The keys of a chunk are those of its tokens and of the ``window`` tokens before it. They are views, whose gradients
    are summed once.
    """
    s = query.size(2)
    if window is None or window >= s - 1:
        return core(query, key, value, None)
    chunk = chunk_size(window)
    queries = query.split(chunk, 2)
    padding = (0, 0, window, -s % chunk)
    keys, values = (F.pad(tensor, padding).unfold(2, window + chunk, chunk).unbind(2) for tensor in (key, value))
    mask = chunk_mask(chunk, window, query.dtype, query.device)
    contexts = []
    for number, rows in enumerate(queries):
        visible = slice(max(window - number * chunk, 0), window + rows.size(2))  # without the padding
        chunk_keys, chunk_values = (tensors[number][..., visible].transpose(2, 3) for tensors in (keys, values))
        contexts.append(core(rows, chunk_keys, chunk_values, mask[: rows.size(2), visible]))
    return torch.cat(contexts, 2)


@lru_cache(maxsize=4)
def chunk_mask(chunk: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [q, k] of a chunk's queries with the ``window`` keys before the chunk and its own: 0 or -inf.

    Cached. With a boolean mask each call would save an additive copy for its backward pass.
    """
    visible = torch.ones(chunk, window + chunk, dtype=torch.bool, device=device).tril(window).triu()
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, -torch.inf)


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, window: int | None, core: Core
) -> Tensor:
    """Equals ``attend_in_blocks``, in one call with a mask for the entire sequence."""
    return core(query, key, value, dense_mask(query.size(2), query.device, segment_ids, window))


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, window: int | None) -> Tensor:
    """Equals ``attend_in_blocks``, in one call of flash attention: fp16 or bf16 on a GPU, without dropout."""
    from torch.nn.attention.varlen import varlen_attn  # imported here: it imports torch's compiler

    b, n, s, _ = query.shape
    longest, ends = s, torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
    if segment_ids is not None:
        longest, ends = _longest_and_ends(segment_ids, query.device)
    sides = (-1, -1) if window is None else (-1 if window >= longest - 1 else window, 0)
    is_grouped = key.size(1) != n
    if is_grouped and torch.__version__ < "2.12":  # earlier versions have no ``enable_gqa``
        (key, value), is_grouped = (x.repeat_interleave(n // x.size(1), 1) for x in (key, value)), False
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [b x s, n or g, d]
    options: dict[str, Any] = {"enable_gqa": True} if is_grouped else {}
    context = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=sides, **options)
    assert isinstance(context, Tensor), "a pair only on request"
    return context.unflatten(0, (b, s)).transpose(1, 2)


def dense_mask(s: int, device: torch.device, segment_ids: Tensor | None, window: int | None) -> Tensor | None:
    """Boolean mask [s, s] or [b, 1, s, s], True where a query attends to a key; None without segments and window."""
    same = None if segment_ids is None else (segment_ids.unsqueeze(-1) == segment_ids.unsqueeze(-2)).unsqueeze(1)
    if window is None or (same is None and window >= s - 1):
        return same
    near = window_mask(s, window, device)
    return near if same is None else same & near


@lru_cache(maxsize=4)
def window_mask(s: int, window: int, device: torch.device) -> Tensor:
    """Causal window mask [s, s], True for a token itself and the ``window`` tokens before it; cached."""
    return torch.ones(s, s, dtype=torch.bool, device=device).tril().triu(-window)


_CACHE: dict[tuple[StorageWeakRef, tuple[int, ...], str], Any] = {}


def cached_for(tensor: Tensor, name: str, compute: Callable[[], Any]) -> Any:
    """The result of ``compute``, cached under ``name`` for the storage of ``tensor``, which must not be modified.

    Recomputed layers get a different tensor object with the same storage.
    """
    key = StorageWeakRef(tensor.untyped_storage()), tuple(tensor.shape), name
    if key not in _CACHE:
        for old in [old for old in _CACHE if old[0].expired()]:
            del _CACHE[old]
        _CACHE[key] = compute()
    return _CACHE[key]


def keep_on_host(tensor: Tensor, host: Tensor) -> Tensor:
    """Register ``host`` as the copy of ``tensor`` in host memory; returns ``tensor``."""
    cached_for(tensor, "on host", lambda: host)
    return tensor


def copy_on_host(tensor: Tensor) -> Tensor | None:
    """``tensor`` in host memory, if it is there or a copy has been kept."""
    return tensor if tensor.is_cpu else cached_for(tensor, "on host", lambda: None)


def on_both(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """``function(tensor)``. A copy of ``tensor`` kept on the host gives one of the result."""
    result, host = function(tensor), copy_on_host(tensor)
    return result if host is None or host is tensor else keep_on_host(result, function(host))


def as_int32(tokens: Tensor) -> Tensor:
    """``tokens`` as int32, the type sent between stages."""
    return on_both(Tensor.int, tokens)


def segment_ids_of(tokens: Tensor, eod_token: int) -> Tensor:
    """Segment ids, int32 [b, s]: the number of end-of-document tokens before each token of ``tokens`` [b, s].

    ``tokens`` [b, 2, s] contain segment ids already.
    """
    return on_both(partial(_segment_ids, eod_token=eod_token), tokens)


def _segment_ids(tokens: Tensor, eod_token: int) -> Tensor:
    if tokens.dim() == 3:
        return tokens[:, 1].int()
    ends = (tokens == eod_token).int()
    return ends.cumsum(-1, dtype=torch.int32) - ends


def document_lengths(segment_ids: Tensor) -> list[list[int]]:
    """Document lengths (runs of equal ``segment_ids`` [b, s]), a list per sample; cached for all layers.

    Without a host copy of the ids, the host waits for the device.
    """

    def compute() -> list[list[int]]:
        host = cached_for(segment_ids, "on host", lambda: None)
        ids = segment_ids.cpu() if host is None else host
        changes = ids[:, 1:] != ids[:, :-1]
        bounds = ([0, *(row.nonzero().flatten() + 1).tolist(), ids.size(1)] for row in changes)
        return [[end - begin for begin, end in pairwise(row)] for row in bounds]

    lengths: list[list[int]] = cached_for(segment_ids, "lengths", compute)
    return lengths


def _longest_and_ends(segment_ids: Tensor, device: torch.device) -> tuple[int, Tensor]:
    """Length of the longest document, and cumulative document ends in [b x s], int32; cached for all layers."""

    def compute() -> tuple[int, Tensor]:
        lengths = [*chain(*document_lengths(segment_ids))]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        ends = ends.pin_memory() if device.type == "cuda" else ends
        return max(lengths), ends.to(device, non_blocking=True)

    longest_and_ends: tuple[int, Tensor] = cached_for(segment_ids, f"ends on {device}", compute)
    return longest_and_ends


def positions_in_segment(segment_ids: Tensor) -> Tensor:
    """Positions [b, s] counted from the first token of each segment in ``segment_ids`` [b, s]."""
    index = torch.arange(segment_ids.size(-1), device=segment_ids.device).expand_as(segment_ids)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return index - index.masked_fill(~begins, 0).cummax(-1).values
