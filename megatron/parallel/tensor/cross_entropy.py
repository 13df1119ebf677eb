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

from megatron.parallel.tensor import rows_at_once


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
    type; they are converted some rows at a time, so that never all of them are in fp32. ``compiled`` makes one kernel
    of each pass over the logits, by torch's compiler, which converts what it reads.
    """
    first = logits.size(-1) * group.rank()
    columns = logits.size(-1) if vocab_size is None else min(max(vocab_size - first, 0), logits.size(-1))
    dtype = torch.float32 if in_fp32 else logits.dtype
    rows = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten() - first, columns, dtype, group, compiled)
    return rows.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """logits [r, v/t], labels [r] as columns of this rank -> loss [r]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        columns: int,
        dtype: torch.dtype,
        group: ProcessGroup,
        compiled: bool,
    ) -> Tensor:
        elsewhere = (labels < 0) | (labels >= columns)
        index = labels.masked_fill(elsewhere, 0).unsqueeze(-1)
        statistics_of = _compiled(_statistics) if compiled else _statistics_by_rows
        if columns:
            largest, logarithms, own = statistics_of(logits, index, columns, dtype)
        else:
            largest, logarithms, own = logits.new_full((3, len(logits)), -torch.inf, dtype=dtype)
        overall = largest
        if group.size() > 1:
            overall = largest.clone()
            dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)

        in_sum = logarithms + (largest - overall)
        sums = torch.stack([in_sum.exp(), (own - overall).masked_fill(elsewhere, 0.0)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)

        normalizers = sums[0].log()
        ctx.save_for_backward(logits, largest + logarithms, (in_sum - normalizers).exp(), index, elsewhere)
        ctx.columns, ctx.compiled = columns, compiled
        return normalizers - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizers, shares, index, elsewhere = ctx.saved_tensors
        scale, at_label = (x.unsqueeze(-1) for x in (shares * grad, (-grad).masked_fill(elsewhere, 0.0)))
        if ctx.compiled:
            found = _compiled(_gradient)(logits, normalizers, index, scale, at_label, ctx.columns)
        else:
            found = _gradient_by_rows(logits, index, scale, at_label, ctx.columns)
        return found, *(None,) * 5


def _statistics_by_rows(logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """logits [r, v/t], of which ``columns`` count -> by row the largest, the logarithm of the sum of the exponentials
    less that, and the label's own [3, r]."""
    found = logits.new_empty((3, len(logits)), dtype=dtype)
    for rows in _chunks(logits, columns):
        counted = logits[rows, :columns].to(dtype)
        found[0, rows] = counted.amax(-1)
        found[1, rows] = -counted.log_softmax(-1).amax(-1)
        found[2, rows] = counted.gather(-1, index[rows]).squeeze(-1)
        del counted  # before the next rows take as much
    return found


def _statistics(logits: Tensor, index: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The same, of all rows at once, to be compiled."""
    counted = logits[:, :columns].to(dtype)
    largest = counted.amax(-1)
    logarithms = (counted - largest.unsqueeze(-1)).exp().sum(-1).log()
    return torch.stack([largest, logarithms, counted.gather(-1, index).squeeze(-1)])


def _gradient_by_rows(logits: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int) -> Tensor:
    """logits [r, v/t] -> ``scale`` [r, 1] x the softmax of those that count, plus ``at_label`` [r, 1] at the label."""
    found = torch.empty_like(logits)
    found[:, columns:] = 0
    for rows in _chunks(logits, columns):
        probabilities = logits[rows, :columns].softmax(-1, dtype=scale.dtype)
        of_label = probabilities.gather(-1, index[rows]).mul_(scale[rows]).add_(at_label[rows])
        torch.mul(probabilities, scale[rows], out=found[rows, :columns])
        found[rows].scatter_(-1, index[rows], of_label.to(found.dtype))
        del probabilities  # before the next rows take as much
    return found


def _gradient(
    logits: Tensor, normalizers: Tensor, index: Tensor, scale: Tensor, at_label: Tensor, columns: int
) -> Tensor:
    """The same, of all rows at once, to be compiled; ``normalizers`` [r] are logarithms of the exponentials' sums."""
    column = torch.arange(logits.size(-1), device=logits.device)
    probabilities = (logits.to(scale.dtype) - normalizers.unsqueeze(-1)).exp()
    of_logits = probabilities * scale + torch.where(column == index, at_label, 0.0)
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
