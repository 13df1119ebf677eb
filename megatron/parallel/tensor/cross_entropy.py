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
    passes = (_compiled(_sums), _compiled(_gradient)) if compiled else (_sums_by_rows, _gradient_by_rows)
    rows = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten() - first, columns, dtype, group, *passes)
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
        sums_of: Callable[..., Tensor],
        gradient_of: Callable[..., Tensor],
    ) -> Tensor:
        counted = logits[:, :columns]
        largest = counted.amax(-1).to(dtype) if columns else logits.new_full(labels.shape, -torch.inf, dtype=dtype)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)

        elsewhere = (labels < 0) | (labels >= columns)
        index = labels.masked_fill(elsewhere, 0).unsqueeze(-1)
        sums = sums_of(counted, largest, index)
        sums[1].masked_fill_(elsewhere, 0.0)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)

        logarithms = sums[0].log()
        ctx.save_for_backward(logits, largest + logarithms, index, elsewhere)
        ctx.columns, ctx.gradient_of = columns, gradient_of
        return logarithms - sums[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizers, index, elsewhere = ctx.saved_tensors
        own = elsewhere.unsqueeze(-1).to(grad.dtype) - 1
        return ctx.gradient_of(logits, normalizers, index, own, grad, ctx.columns), *(None,) * 6


def _sums_by_rows(counted: Tensor, largest: Tensor, index: Tensor) -> Tensor:
    """Columns that count [r, c] -> the sum of the exponentials, and the label's own logit [2, r], less the largest."""
    sums = counted.new_zeros((2, len(counted)), dtype=largest.dtype)
    for rows in _chunks(counted):
        shifted = counted[rows].to(largest.dtype) - largest[rows].unsqueeze(-1)
        sums[1, rows] = shifted.gather(-1, index[rows]).squeeze(-1)
        sums[0, rows] = shifted.exp_().sum(-1)
        del shifted  # before the next rows take as much
    return sums


def _sums(counted: Tensor, largest: Tensor, index: Tensor) -> Tensor:
    """The same, of all rows at once, to be compiled."""
    if not counted.size(-1):
        return counted.new_zeros((2, len(counted)), dtype=largest.dtype)
    shifted = counted.to(largest.dtype) - largest.unsqueeze(-1)
    return torch.stack([shifted.exp().sum(-1), shifted.gather(-1, index).squeeze(-1)])


def _gradient_by_rows(
    logits: Tensor, normalizers: Tensor, index: Tensor, own: Tensor, grad: Tensor, columns: int
) -> Tensor:
    """The gradient of logits [r, v/t], of which ``columns`` count; ``own`` [r, 1] is -1 where the label is of them."""
    counted, grad_logits = logits[:, :columns], torch.empty_like(logits)
    grad_logits[:, columns:] = 0
    for rows in _chunks(counted):
        probabilities = (counted[rows].to(grad.dtype) - normalizers[rows].unsqueeze(-1)).exp_()
        probabilities.scatter_add_(-1, index[rows], own[rows])
        grad_logits[rows, :columns] = probabilities.mul_(grad[rows].unsqueeze(-1))
        del probabilities  # before the next rows take as much
    return grad_logits


def _gradient(logits: Tensor, normalizers: Tensor, index: Tensor, own: Tensor, grad: Tensor, columns: int) -> Tensor:
    """The same, of all rows at once, to be compiled."""
    column = torch.arange(logits.size(-1), device=logits.device)
    probabilities = (logits.to(grad.dtype) - normalizers.unsqueeze(-1)).exp()
    of_logits = (probabilities + torch.where(column == index, own, 0.0)) * grad.unsqueeze(-1)
    return torch.where(column < columns, of_logits, 0.0).to(logits.dtype)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows that are converted together; none without columns."""
    rows, columns = logits.shape
    if columns:
        step = rows_at_once(columns, logits.device.type)
        yield from (slice(start, start + step) for start in range(0, rows, step))


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
