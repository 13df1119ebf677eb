"""Cross entropy of logits that are sharded by vocabulary.

b batch, s sequence, v vocabulary with its padding, t ranks of the group, r rows: b x s
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.tensor import rows_at_once


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, group: ProcessGroup, vocab_size: int | None = None, *, in_fp32: bool = True
) -> Tensor:
    """logits [b, s, v/t], labels [b, s] -> loss [b, s], or of rows alone, without gathering the logits.

    Columns from ``vocab_size`` on are padding and do not count. With ``in_fp32`` the loss is fp32 for logits of any
    type; they are converted some rows at a time, so that never all of them are in fp32.
    """
    first = logits.size(-1) * group.rank()
    columns = logits.size(-1) if vocab_size is None else min(max(vocab_size - first, 0), logits.size(-1))
    dtype = torch.float32 if in_fp32 else logits.dtype
    rows = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten() - first, columns, dtype, group)
    return rows.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """logits [r, v/t], labels [r] as columns of this rank -> loss [r]."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, columns: int, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
        counted = logits[:, :columns]
        largest = counted.amax(-1).to(dtype) if columns else logits.new_full(labels.shape, -torch.inf, dtype=dtype)
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)

        elsewhere = (labels < 0) | (labels >= columns)
        index = labels.masked_fill(elsewhere, 0).unsqueeze(-1)
        sums = logits.new_zeros((2, *labels.shape), dtype=dtype)  # of exponentials; and the label's own logit
        for rows in _chunks(counted):
            shifted = counted[rows].to(dtype) - largest[rows].unsqueeze(-1)
            sums[1, rows] = shifted.gather(-1, index[rows]).squeeze(-1)
            sums[0, rows] = shifted.exp_().sum(-1)
            del shifted  # before the next rows take as much
        sums[1].masked_fill_(elsewhere, 0.0)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)

        logarithms = sums[0].log()
        ctx.save_for_backward(logits, largest + logarithms, index, elsewhere)
        ctx.columns = columns
        return logarithms - sums[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, normalizers, index, elsewhere = ctx.saved_tensors
        counted, own = logits[:, : ctx.columns], elsewhere.unsqueeze(-1).to(grad.dtype) - 1
        grad_logits = torch.empty_like(logits)
        grad_logits[:, ctx.columns :] = 0
        for rows in _chunks(counted):
            probabilities = (counted[rows].to(grad.dtype) - normalizers[rows].unsqueeze(-1)).exp_()
            probabilities.scatter_add_(-1, index[rows], own[rows])
            grad_logits[rows, : ctx.columns] = probabilities.mul_(grad[rows].unsqueeze(-1))
            del probabilities  # before the next rows take as much
        return grad_logits, None, None, None, None


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
