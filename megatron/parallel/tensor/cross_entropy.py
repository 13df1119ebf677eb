"""Cross entropy of logits that are sharded by vocabulary.

b batch, s sequence, v vocabulary with its padding, t ranks of the group, r rows: b x s
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.ops.cross_entropy import CrossEntropyKernel

_IN_CHUNKS = CrossEntropyKernel()


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    vocab_size: int | None = None,
    *,
    in_fp32: bool = True,
    kernel: CrossEntropyKernel = _IN_CHUNKS,
) -> Tensor:
    """logits [b, s, v/t], labels [b, s] -> loss [b, s], or [r, v/t], [r] -> [r], without gathering the logits.

    Columns from ``vocab_size`` on are padding and do not count. With ``in_fp32`` the loss is fp32 for logits of any
    type. The loss of a label outside the vocabulary is the logsumexp, as if its logit were 0. ``kernel`` computes what
    needs no other rank.
    """
    first = logits.size(-1) * group.rank()
    columns = logits.size(-1) if vocab_size is None else min(max(vocab_size - first, 0), logits.size(-1))
    dtype = torch.float32 if in_fp32 else logits.dtype
    outside = (labels < 0) | (labels >= (vocab_size or logits.size(-1) * group.size()))
    own_labels = labels.flatten() - first
    rows = _CrossEntropy.apply(logits.flatten(0, -2), own_labels, outside.flatten(), columns, dtype, group, kernel)
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
        kernel: CrossEntropyKernel,
    ) -> Tensor:
        elsewhere = (labels < 0) | (labels >= columns)
        index = labels.masked_fill(elsewhere, 0)
        own, largest, rest = logits.new_full((3, len(logits)), -torch.inf, dtype=torch.float32)
        if columns:
            own, largest, rest = kernel.statistics(logits, index, columns, dtype, group.size() > 1)
        normalizers = largest + rest
        if group.size() > 1:
            at_label = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            losses, shares = _over_ranks(at_label, largest, rest, elsewhere, outside, group)
        else:
            losses, shares = torch.where(outside, normalizers, -own), torch.ones_like(own)
        ctx.save_for_backward(logits, normalizers, shares, index, elsewhere)
        ctx.columns, ctx.kernel = columns, kernel
        return losses.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, normalizers, shares, index, elsewhere = ctx.saved_tensors
        scale, at_label = (shares * grad).to(grad.dtype), (-grad).masked_fill(elsewhere, 0.0)
        gradient = ctx.kernel.gradient(logits, normalizers, index, scale, at_label, ctx.columns)
        return gradient, *(None,) * 6


def _over_ranks(
    at_label: Tensor, largest: Tensor, rest: Tensor, elsewhere: Tensor, outside: Tensor, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """The losses [r], and the share of the exponentials' sum that this rank's columns have [r].

    Of these columns there are the logit at the label [r], the ``largest`` [r] and the ``rest`` [r] of the logsumexp;
    labels may be ``elsewhere`` [r] than among them, or ``outside`` [r] of all.
    """
    of_all = largest.clone()
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group)
    in_sum = largest - of_all + rest
    sums = torch.stack([in_sum.exp(), (at_label - of_all).masked_fill(elsewhere, 0.0)])
    dist.all_reduce(sums, group=group)
    logarithms = sums[0].log()
    return torch.where(outside, of_all + logarithms, logarithms - sums[1]), (in_sum - logarithms).exp()


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
