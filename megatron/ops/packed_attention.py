"""Attention within documents and windows, without scores or a mask of the entire sequence.

b batch, s sequence, n heads of queries, g heads of keys and values, d size of a head
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from megatron.ops.choices import SHORTEST_BLOCK, chunk_size

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""core(query [b, n, q, d], key [b, g, k, d], value [b, g, k, d], mask) -> context [b, n, q, d]. ``mask``, [q, k] or
[b, 1, q, k], is True where a row attends to a column, or is added to the scores; without it attention is causal, or to
every column, as the model has it."""


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, window: int | None, core: Core
) -> Tensor:
    """[b, n, s, d], [b, g, s, d] twice -> [b, n, s, d]: a call of ``core`` for each document or chunk of a window.

    A token attends to the ``window`` tokens before it, or to all of its document if that is None. A document is a run
    of equal ``segment_ids`` [b, s]; neighbors that are short share a call. Tokens of different documents are in no call
    together, and the largest mask is for a chunk.
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
        contexts.append(torch.cat([_in_block(core, window, *part) for part in parts], 2))
    return torch.cat(contexts)


def _in_block(
    core: Core, window: int | None, lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor, ids: Tensor
) -> Tensor:
    """Attention of one document, or of several short ones."""
    if len(lengths) > 1:
        return attend_with_mask(query, key, value, ids, window, core)
    return _in_window(query, key, value, core, window)


def short_together(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Lengths of neighboring documents, together up to SHORTEST_BLOCK tokens; a longer one by itself."""
    block: list[int] = []
    for length in lengths:
        if block and sum(block) + length > SHORTEST_BLOCK:
            yield block
            block = []
        block.append(length)
    yield block


def _in_window(query: Tensor, key: Tensor, value: Tensor, core: Core, window: int | None) -> Tensor:
    """Attention of one document, in chunks if tokens do not attend to all of it.

    The keys of a chunk are its own and the ``window`` before it. They are views, and their gradients are summed once.
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
        columns, contents = (tensors[number][..., visible].transpose(2, 3) for tensors in (keys, values))
        contexts.append(core(rows, columns, contents, mask[: rows.size(2), visible]))
    return torch.cat(contexts, 2)


@lru_cache(maxsize=4)
def chunk_mask(chunk: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Added to scores of a chunk's rows with the ``window`` columns before the chunk and its own [q, k]: 0 or -inf.

    Made once. Of a mask of bools each call would keep such a copy for its backward pass.
    """
    visible = torch.ones(chunk, window + chunk, dtype=torch.bool, device=device).tril(window).triu()
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, -torch.inf)


def attend_with_mask(
    query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, window: int | None, core: Core
) -> Tensor:
    """The same as ``attend_in_blocks`` in one call with a mask of the entire sequence."""
    return core(query, key, value, dense_mask(query.size(2), query.device, segment_ids, window))


def attend_varlen(query: Tensor, key: Tensor, value: Tensor, segment_ids: Tensor | None, window: int | None) -> Tensor:
    """The same as ``attend_in_blocks`` in one call of flash attention: fp16 or bf16 on a GPU, without dropout."""
    from torch.nn.attention.varlen import varlen_attn  # which imports torch's compiler

    b, n, s, _ = query.shape
    longest, ends = s, torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
    if segment_ids is not None:
        longest, ends = _longest_and_ends(segment_ids, query.device)
    sides = (-1, -1) if window is None else (-1 if window >= longest - 1 else window, 0)
    is_grouped = key.size(1) != n
    if is_grouped and torch.__version__ < "2.12":  # which has no ``enable_gqa``
        (key, value), is_grouped = (x.repeat_interleave(n // x.size(1), 1) for x in (key, value)), False
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [b x s, n or g, d]
    options: dict[str, Any] = {"enable_gqa": True} if is_grouped else {}
    context = varlen_attn(query, key, value, ends, ends, longest, longest, window_size=sides, **options)
    assert isinstance(context, Tensor), "a pair only if it is asked for"
    return context.unflatten(0, (b, s)).transpose(1, 2)


def dense_mask(s: int, device: torch.device, segment_ids: Tensor | None, window: int | None) -> Tensor | None:
    """True where a row attends to a column, [s, s] or [b, 1, s, s]; None if nothing but causality limits it."""
    own = None if segment_ids is None else (segment_ids.unsqueeze(-1) == segment_ids.unsqueeze(-2)).unsqueeze(1)
    if window is None or (own is None and window >= s - 1):
        return own
    near = window_mask(s, window, device)
    return near if own is None else own & near


@lru_cache(maxsize=4)
def window_mask(s: int, window: int, device: torch.device) -> Tensor:
    """True where a column is the row's own or one of the ``window`` before it [s, s]; made once."""
    return torch.ones(s, s, dtype=torch.bool, device=device).tril().triu(-window)


_KNOWN: dict[tuple[StorageWeakRef, tuple[int, ...], str], Any] = {}


def known_of(tensor: Tensor, name: str, compute: Callable[[], Any]) -> Any:
    """What ``compute`` returns: computed once for all tensors that are ``tensor``, which must not be changed.

    Recomputed layers get another one than before, with the same memory.
    """
    key = StorageWeakRef(tensor.untyped_storage()), tuple(tensor.shape), name
    if key not in _KNOWN:
        for old in [old for old in _KNOWN if old[0].expired()]:
            del _KNOWN[old]
        _KNOWN[key] = compute()
    return _KNOWN[key]


def keep_on_host(tensor: Tensor, host: Tensor) -> Tensor:
    """``tensor``, of which ``host`` is a copy in the host's memory."""
    known_of(tensor, "on host", lambda: host)
    return tensor


def as_int32(tokens: Tensor) -> Tensor:
    """``tokens`` in the type in which they travel between stages; if they are on the host, too, so is the result."""
    host = known_of(tokens, "on host", lambda: None)
    return tokens.int() if host is None else keep_on_host(tokens.int(), host.int())


def segment_ids_of(tokens: Tensor, eod_token: int) -> Tensor:
    """tokens [b, s] -> ends of document before each token, int32 [b, s]; an end counts from the next token on.

    Of tokens with segment ids, [b, 2, s], the latter. If the tokens are on the host, too, so are their segment ids.
    """
    host = known_of(tokens, "on host", lambda: None)
    ids = _segment_ids(tokens, eod_token)
    return ids if host is None else keep_on_host(ids, _segment_ids(host, eod_token))


def _segment_ids(tokens: Tensor, eod_token: int) -> Tensor:
    if tokens.dim() == 3:
        return tokens[:, 1].int()
    ends = (tokens == eod_token).int()
    return ends.cumsum(-1, dtype=torch.int32) - ends


def document_lengths(segment_ids: Tensor) -> list[list[int]]:
    """segment_ids [b, s] -> lengths of the runs of equal ids, a list for each row; computed once for all layers.

    The host waits for a copy of ids that it does not have.
    """

    def compute() -> list[list[int]]:
        host = known_of(segment_ids, "on host", lambda: None)
        ids = segment_ids.cpu() if host is None else host
        changes = ids[:, 1:] != ids[:, :-1]
        bounds = ([0, *(row.nonzero().flatten() + 1).tolist(), ids.size(1)] for row in changes)
        return [[end - begin for begin, end in pairwise(row)] for row in bounds]

    lengths: list[list[int]] = known_of(segment_ids, "lengths", compute)
    return lengths


def _longest_and_ends(segment_ids: Tensor, device: torch.device) -> tuple[int, Tensor]:
    """Tokens of the longest document, and where documents begin and end in [b x s], int32; once for all layers."""

    def compute() -> tuple[int, Tensor]:
        lengths = [*chain(*document_lengths(segment_ids))]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        ends = ends.pin_memory() if device.type == "cuda" else ends
        return max(lengths), ends.to(device, non_blocking=True)

    found: tuple[int, Tensor] = known_of(segment_ids, f"ends on {device}", compute)
    return found


def positions_in_segment(segment_ids: Tensor) -> Tensor:
    """segment_ids [b, s] -> distance from the first token of the segment [b, s]."""
    index = torch.arange(segment_ids.size(-1), device=segment_ids.device).expand_as(segment_ids)
    begins = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0), value=True)
    return index - index.masked_fill(~begins, 0).cummax(-1).values
