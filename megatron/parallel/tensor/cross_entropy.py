"""Cross entropy of logits that are sharded by vocabulary.

b batch, s sequence, v vocabulary with its padding, t ranks of the group, r rows: b x s
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.ops.device import rows_at_once


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    vocab_size: int | None = None,
    *,
    in_fp32: bool = True,
    compiled: bool = False,
) -> Tensor:
    """logits [b, s, v/t], labels [b, s] -> loss [b, s], or of rows alone, without gathering the logits.

    Columns from ``vocab_size`` on are padding and do not count. With ``in_fp32`` the loss is fp32 for logits of any
    type; they are converted some rows at a time, so that never all of them are in fp32. The loss of a label outside the
    vocabulary is the logarithm of the sum of the exponentials, as if its logit were 0. ``compiled`` makes one kernel
    of each pass over the logits, by torch's compiler, which converts what it reads.
    """
    first = logits.size(-1) * group.rank()
    columns = logits.size(-1) if vocab_size is None else min(max(vocab_size - first, 0), logits.size(-1))
    dtype = torch.float32 if in_fp32 else logits.dtype
    outside = (labels < 0) | (labels >= (vocab_size or logits.size(-1) * group.size()))
    own_labels = labels.flatten() - first
    rows = _CrossEntropy.apply(logits.flatten(0, -2), own_labels, outside.flatten(), columns, dtype, group, compiled)
    return rows.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """logits [r, v/t], labels [r] as columns of this rank, and whether each is ``outside`` all ranks' -> loss [r]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        outside: Tensor,
        columns: int,
        dtype: torch.dtype,
        group: ProcessGroup,
        compiled: bool,
    ) -> Tensor:
        elsewhere = (labels < 0) | (labels >= columns)
        index = labels.masked_fill(elsewhere, 0)
        statistics_of = _compiled(_statistics) if compiled else _statistics_by_rows
        own, normalizers = logits.new_full((2, len(logits)), -torch.inf, dtype=torch.float32)
        if columns:
            own, normalizers = statistics_of(logits, index, columns, dtype, group.size() > 1)
        if group.size() > 1:
            losses, shares = _over_ranks(own, normalizers, elsewhere, outside, group)
        else:
            losses, shares = torch.where(outside, normalizers, -own), torch.ones_like(own)
        ctx.save_for_backward(logits, normalizers, shares, index, elsewhere)
        ctx.columns, ctx.compiled = columns, compiled
        return losses.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizers, shares, index, elsewhere = ctx.saved_tensors
        scale, at_label = (shares * grad).to(grad.dtype), (-grad).masked_fill(elsewhere, 0.0)
        if ctx.compiled:
            found = _compiled(_gradient)(logits, normalizers, index, scale, at_label, ctx.columns)
        else:
            found = _gradient_by_rows(logits, index, scale, at_label, ctx.columns)
        return found, *(None,) * 6


def _over_ranks(
    own: Tensor, normalizers: Tensor, elsewhere: Tensor, outside: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The losses [r], and the share of the exponentials' sum that this rank's columns have [r].

    ``own`` [r] and ``normalizers`` [r] are of these columns alone; labels may be ``elsewhere`` [r] than among them, or
    ``outside`` [r] of all.
    """
    largest = normalizers.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    in_sum = normalizers - largest
    sums = torch.stack([in_sum.exp(), (own + in_sum).masked_fill(elsewhere, 0.0)])
    dist.all_reduce(sums, group=group)
    logarithms = sums[0].log()
    return torch.where(outside, largest + logarithms, logarithms - sums[1]), (in_sum - logarithms).exp()


def _statistics_by_rows(logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype, from_largest: bool) -> Tensor:
    """logits [r, v/t], of which ``columns`` count -> the label's logarithmic probability among them, and the logarithm
    of the sum of their exponentials [2, r], in fp32.

    That is accurate for every row ``from_largest`` logits; otherwise it is computed from what is read of the label.
    """
    found = logits.new_empty((2, len(logits)), dtype=torch.float32)
    for rows in _chunks(logits, columns):
        counted = logits[rows, :columns].to(dtype)
        probabilities = counted.log_softmax(-1)
        at_label = index[rows].unsqueeze(-1)
        found[0, rows] = probabilities.gather(-1, at_label).squeeze(-1)
        if from_largest:
            found[1, rows] = counted.amax(-1).float() - probabilities.amax(-1)
        else:
            found[1, rows] = counted.gather(-1, at_label).squeeze(-1) - found[0, rows]
        del counted, probabilities  # before the next rows take as much
    return found


def _statistics(logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype, from_largest: bool) -> Tensor:
    """The same, of all rows at once and accurate in any type, to be compiled."""
    counted = logits[:, :columns].float()
    largest = counted.amax(-1)
    logarithms = (counted - largest.unsqueeze(-1)).exp().sum(-1).log()
    own = counted.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return torch.stack([own - largest - logarithms, largest + logarithms])


def _gradient_by_rows(logits: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int) -> Tensor:
    """logits [r, v/t] -> ``scale`` [r] x the softmax of those that count, plus ``at_label`` [r] at the label."""
    found = torch.empty_like(logits)
    found[:, columns:] = 0
    for rows in _chunks(logits, columns):
        probabilities = logits[rows, :columns].to(scale.dtype).softmax(-1)
        at_label[rows] += probabilities.gather(-1, index[rows].unsqueeze(-1)).squeeze(-1) * scale[rows]
        torch.mul(probabilities, scale[rows].unsqueeze(-1), out=found[rows, :columns])
        del probabilities  # before the next rows take as much
    if columns:  # torch's scatter_ on CPUs would convert all of it to fp32 and back
        found[torch.arange(len(found), device=found.device), index] = at_label.to(found.dtype)
    return found


def _gradient(
    logits: Tensor, normalizers: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
) -> Tensor:
    """The same, of all rows at once, to be compiled; ``normalizers`` [r] are logarithms of the exponentials' sums."""
    column = torch.arange(logits.size(-1), device=logits.device)
    probabilities = (logits.to(scale.dtype) - normalizers.unsqueeze(-1)).exp()
    at_column = torch.where(column == index.unsqueeze(-1), at_label.unsqueeze(-1), 0.0)
    of_logits = probabilities * scale.unsqueeze(-1) + at_column
    return torch.where(column < columns, of_logits, 0.0).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _chunks(logits: Tensor, columns: int) -> Iterator[slice]:
    """Slices of the rows that are converted together; none without columns."""
    if columns:
        step = rows_at_once(columns, logits.device.type)
        yield from (slice(start, start + step) for start in range(0, len(logits), step))


def vocab_parallel_argmax(logits: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
    """logits [.., v/t] -> the index of the largest [..], the first of equals, without gathering the logits.

    Columns from ``vocab_size`` on are padding and do not count.
    """
    first = logits.size(-1) * group.rank()
    columns = min(max(vocab_size - first, 0), logits.size(-1))
    own = logits[..., :columns]
    largest = own.amax(-1) if columns else logits.new_full(logits.shape[:-1], -torch.inf)
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    index = own.argmax(-1) + first if columns else torch.zeros_like(overall, dtype=torch.long)
    index = index.masked_fill(largest < overall, torch.iinfo(torch.long).max)
    dist.all_reduce(index, op=dist.ReduceOp.MIN, group=group)
    return index
