"""BERT with a linear classifier as its head, for fine-tuning: its list of layers, and its loss.

The layers up to the pooler are BERT's and have the names of its parameters, so that pretrained weights fit.

b batch, s sequence, h hidden, c classes
"""

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.bert import ReplicatedLinear, encoder_layers
from megatron.model.containers import Layers, LossFn
from megatron.model.gpt2 import without_gradient_unless_finite
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import first_token
from megatron.parallel.tensor.random import random_stream


class ClassifierHead(nn.Module):
    """hidden [b, s, h] -> logits [b, c]: the pooler of the first token, [CLS], then dropout and a linear layer."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        h = config.hidden_size
        self.layout, self.sequence_dim, self.dropout = layout, config.sequence_dim, config.hidden_dropout
        self.pooler = ReplicatedLinear(config, "order.pooler", h, h)
        self.classifier = ReplicatedLinear(config, "classifier", h, len(config.classes))

    def forward(self, hidden: Tensor) -> Tensor:
        pooled = torch.tanh(self.pooler(first_token(hidden, self.layout, self.sequence_dim)))
        if self.training and self.dropout:
            with random_stream(per_rank=False):
                pooled = F.dropout(pooled, self.dropout)
        return self.classifier(pooled)


def classifier_layers(config: ModelConfig, layout: ParallelLayout) -> Layers:
    """The layers in order, not yet built; the same list as in the spec."""
    return [*encoder_layers(config, layout), LayerSpec(ClassifierHead, config, layout)]


def classifier_loss(config: ModelConfig, layout: ParallelLayout) -> LossFn:
    """The weighted sum of the samples' cross entropies. If it is not finite, neither is any gradient.

    loss(logits [b, c], (labels, weights)): labels [b], and weights [b] that add up to 1 over the global batch.
    """

    def loss(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        labels, weights = targets
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        return without_gradient_unless_finite((losses * weights).sum())

    return loss


def correct_answers(logits: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    """The sum of the weights of those samples whose largest logit is that of their label; in place of the loss."""
    labels, weights = targets
    return (weights * (logits.argmax(-1) == labels)).sum()
