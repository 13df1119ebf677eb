"""Cross entropy and argmax of logits sharded along the vocabulary.

b batch, s sequence, v padded vocabulary, t ranks of the group, r rows: b x s
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.ops.cross_entropy import CrossEntropyKernel

_PLAIN = CrossEntropyKernel()


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    vocab_size: int | None = None,
    *,
    in_fp32: bool = True,
    kernel: CrossEntropyKernel = _PLAIN,
) -> Tensor:
    """logits [b, s, v/t], labels [b, s] -> loss [b, s], or [r, v/t], [r] -> [r], without gathering the logits.

    Columns from ``vocab_size`` on are padding and excluded. With ``in_fp32`` the loss is fp32 for logits of any dtype.
    The loss of a label outside the vocabulary is the logsumexp, as if its logit were 0. ``kernel`` does the rank-local
    computation.
    """
    first = logits.size(-1) * group.rank()
    columns = logits.size(-1) if vocab_size is None else min(max(vocab_size - first, 0), logits.size(-1))
    dtype = torch.float32 if in_fp32 else logits.dtype
    outside = (labels < 0) | (labels >= (vocab_size or logits.size(-1) * group.size()))
    local_labels = labels.flatten() - first
    rows = _CrossEntropy.apply(logits.flatten(0, -2), local_labels, outside.flatten(), columns, dtype, group, kernel)
    return rows.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """logits [r, v/t], labels [r] relative to this rank's columns, mask ``outside`` the vocabulary [r] -> loss [r]."""

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
        log_probability, largest, rest = logits.new_full((3, len(logits)), -torch.inf, dtype=torch.float32)
        if columns:
            log_probability, largest, rest = kernel.statistics(logits, index, columns, dtype, group.size() > 1)
        normalizers = largest + rest
        if group.size() > 1:
            at_label = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            losses, shares = _over_ranks(at_label, largest, rest, elsewhere, outside, group)
        else:
            losses, shares = torch.where(outside, normalizers, -log_probability), torch.ones_like(log_probability)
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
    """Combine the statistics of all ranks: the losses [r], and this rank's share of the sum of exponentials [r].

    ``at_label`` [r] is the logit at the label, ``largest + rest`` [r] the logsumexp of this rank's columns. Labels may
    be ``elsewhere`` [r] (on another rank), or ``outside`` [r] the vocabulary.
    """
    global_largest = largest.clone()
    dist.all_reduce(global_largest, op=dist.ReduceOp.MAX, group=group)
    local_logsumexp = largest - global_largest + rest  # relative to the global maximum
    sums = torch.stack([local_logsumexp.exp(), (at_label - global_largest).masked_fill(elsewhere, 0.0)])
    dist.all_reduce(sums, group=group)
    logsumexp = sums[0].log()
    losses = torch.where(outside, global_largest + logsumexp, logsumexp - sums[1])
    return losses, (local_logsumexp - logsumexp).exp()


def vocab_parallel_argmax(logits: Tensor, group: ProcessGroup, vocab_size: int) -> Tensor:
    """logits [.., v/t] -> index of the largest logit [..] (the first one if tied), without gathering the logits.

    Columns from ``vocab_size`` on are padding and excluded.
    """
    first = logits.size(-1) * group.rank()
    columns = min(max(vocab_size - first, 0), logits.size(-1))
    unpadded = logits[..., :columns]
    largest = unpadded.amax(-1) if columns else logits.new_full(logits.shape[:-1], -torch.inf)
    overall = largest.clone()
    dist.all_reduce(overall, op=dist.ReduceOp.MAX, group=group)
    index = unpadded.argmax(-1) + first if columns else torch.zeros_like(overall, dtype=torch.long)
    index = index.masked_fill(largest < overall, torch.iinfo(torch.long).max)
    dist.all_reduce(index, op=dist.ReduceOp.MIN, group=group)
    return index
