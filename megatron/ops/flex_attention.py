"""Attention within documents and windows by torch's FlexAttention (arXiv 2412.05496), in one kernel that skips blocks.

b batch, s sequence, k blocks of it, n heads of queries, g heads of keys and values, d size of a head
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from megatron.ops.packed_attention import Core, positions_in_segment

BLOCK = 128
"""Tokens of a block."""


def attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_ids: Tensor | None,
    causal: bool,
    pre_tokens: int,
    core: Core | None = None,
) -> Tensor:
    """The same as ``attend_in_blocks`` in one compiled kernel: on a GPU, without dropout.

    [b, n, s, d], [b, g, s, d] twice -> [b, n, s, d]. torch has no backward pass for it on CPUs.
    """
    kernel = _compiled() if query.is_cuda else flex_attention
    mask = _mask_of(segment_ids, query.size(2), query.device, causal, pre_tokens)
    context = kernel(query, key, value, block_mask=mask, enable_gqa=query.size(1) != key.size(1))
    assert isinstance(context, Tensor), "a pair only if it is asked for"
    return context


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


_MASKS = WeakIdKeyDictionary()
"""Of the segment ids that all layers of a micro-batch share, or of nothing."""
_NO_DOCUMENTS: dict[tuple[int, torch.device, bool, int], BlockMask] = {}


def _mask_of(segment_ids: Tensor | None, s: int, device: torch.device, causal: bool, pre_tokens: int) -> BlockMask:
    if segment_ids is not None:
        if segment_ids not in _MASKS:
            _MASKS[segment_ids] = block_mask(segment_ids, causal, pre_tokens)
        return _MASKS[segment_ids]
    key = (s, device, causal, pre_tokens)
    if key not in _NO_DOCUMENTS:
        one = torch.zeros(1, s, dtype=torch.int32, device=device)
        _NO_DOCUMENTS.clear()
        _NO_DOCUMENTS[key] = block_mask(one, causal, pre_tokens)
    return _NO_DOCUMENTS[key]


def block_mask(segment_ids: Tensor, causal: bool, pre_tokens: int) -> BlockMask:
    """Which blocks of keys each block of queries sees, all of it or a part, by ``segment_ids`` [b, s].

    A token attends to a run of tokens, whose ends never move back from one token to the next. The blocks follow from
    the ends, and no mask of the sequence is made.
    """
    s = segment_ids.size(1)
    index = torch.arange(s, device=segment_ids.device).expand_as(segment_ids)
    first = index - positions_in_segment(segment_ids)
    last = index + positions_in_segment(segment_ids.flip(1)).flip(1)
    if causal:
        first, last = torch.maximum(first, index - pre_tokens), index

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (first[batch, row] <= column) & (column <= last[batch, row])

    least_first, most_first = _ends_of_blocks(first)  # [b, k, 1] each
    least_last, most_last = _ends_of_blocks(last)
    begin = torch.arange(0, s, BLOCK, device=index.device)  # [k]
    end = begin + BLOCK - 1  # a short block at the end is visible in part, so that what it lacks is masked
    visible = (end >= least_first) & (begin <= most_last)  # [b, k, k]
    full = (begin >= most_first) & (end <= least_last)
    partial_blocks, full_blocks = _numbers(visible & ~full), _numbers(full)
    return BlockMask.from_kv_blocks(*partial_blocks, *full_blocks, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(s, s))


def _ends_of_blocks(values: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last of each block of ``values`` [b, s], which never fall: [b, k, 1] each."""
    filled = pad(values.float(), (0, -values.size(1) % BLOCK), mode="replicate").to(values.dtype)
    blocks = filled.unflatten(1, (-1, BLOCK))
    return blocks[..., :1], blocks[..., -1:]


def _numbers(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks [b, k, k] -> how many each row has [b, 1, k], and their numbers, before all others [b, 1, k, k]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)
