"""Loss functions: each factory takes (config, layout) and returns a function of (last layer's output, targets).

If a loss is not finite, all gradients are NaN.

b batch, s sequence, v padded vocabulary, t tensor-parallel size, c classes
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.ops.cross_entropy import cross_entropy_kernel
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_shard
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy

LossFn = Callable[[Any, tuple[Tensor, ...]], Tensor]
"""(output of the last layer, targets of the batch) -> loss.

An optional attribute ``parts`` maps names to the terms of the last loss, [] each, for logging.
"""


def lm_loss(config: ModelConfig, layout: ParallelLayout) -> LossFn:
    """Language-model loss: the weighted sum of the cross entropies of all tokens.

    loss(logits [b, s, v/t], (labels, weights)): labels [b, s], and weights [b, s] that add up to 1 over the tokens of
    the global batch. With a sequence group the logits cover this rank's shard, and the loss is averaged over the group.
    """
    sequence_group, kernel = layout.sequence_group, cross_entropy_kernel()

    def loss(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        labels, weights = (sequence_shard(target, layout, 1) for target in targets)
        if sequence_group:
            weights = weights * sequence_group.size()
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            layout.tensor_group,
            config.vocab_size,
            in_fp32=not config.fp16_lm_cross_entropy,
            kernel=kernel,
        )
        return without_gradient_unless_finite((losses.float() * weights).sum())

    return loss


class BertLoss:
    """BERT's loss: weighted sum of cross entropies of masked tokens, plus mean cross entropy of sentence order.

    loss((token logits, order logits), (labels [b, s], weights [b, s], whether sentences were swapped [b])).
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        self._words_loss = lm_loss(config, layout)
        self.parts = {"masked_lm_loss": torch.zeros(()), "sop_loss": torch.zeros(())}
        """Both terms of the last loss, [], for logging; Megatron-LM's "lm loss" and "sop loss"."""

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, ...]) -> Tensor:
        (logits, order), (labels, weights, swapped) = outputs, targets
        words, order_loss = self._words_loss(logits, (labels, weights)), F.cross_entropy(order.float(), swapped)
        self.parts = {"masked_lm_loss": words.detach(), "sop_loss": order_loss.detach()}
        return without_gradient_unless_finite(words + order_loss)


def classifier_loss(config: ModelConfig, layout: ParallelLayout) -> LossFn:
    """Classification loss: the weighted sum of the cross entropies of all samples.

    loss(logits [b, c], (labels, weights)): labels [b], and weights [b] that add up to 1 over the global batch.
    """

    def loss(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        labels, weights = targets
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return without_gradient_unless_finite((losses * weights).sum())

    return loss


def without_gradient_unless_finite(loss: Tensor) -> Tensor:
    """Make all gradients NaN if ``loss`` is not finite: an infinite loss can have finite gradients."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
