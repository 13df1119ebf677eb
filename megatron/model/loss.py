"""The loss of language models, over logits that are sharded by vocabulary.

b batch, s sequence, v padded vocabulary, t tensor-parallel size
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.sequence import local_shard
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy


def lm_loss(
    logits: Tensor,
    targets: tuple[Tensor, Tensor],
    *,
    group: ProcessGroup,
    vocab_size: int,
    in_fp32: bool,
    sequence_group: ProcessGroup | None = None,
) -> Tensor:
    """The weighted sum of the tokens' cross entropies. If it is not finite, neither is any gradient.

    targets: labels [b, s], and weights [b, s] that add up to 1 over the tokens of the global batch. With a
    sequence group the logits are of this rank's shard, and the loss is the mean over the group.
    """
    labels, weights = (local_shard(target, sequence_group, 1) for target in targets)
    if sequence_group:
        weights = weights * sequence_group.size()
    losses = vocab_parallel_cross_entropy(logits, labels, group, vocab_size, in_fp32=in_fp32)
    return without_gradient_unless_finite((losses.float() * weights).sum())


def without_gradient_unless_finite(loss: Tensor) -> Tensor:
    """``loss``, with gradients that are all NaN if it is not finite: an infinite loss can have finite gradients."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
