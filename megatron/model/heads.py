"""Heads of BERT: masked LM with sentence order prediction, and a classifier for fine-tuning.

Both read the output of the final norm, and name their pooler alike, so that pretrained weights can be loaded.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size, c classes
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.embedding import PairEmbedding, to_logits
from megatron.model.weights import hidden_norm, weight
from megatron.ops.activation import gelu
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import first_token
from megatron.parallel.tensor.layers import all_reduce_gradient, mark_sharded
from megatron.parallel.tensor.linear import linear
from megatron.parallel.tensor.random import random_stream


class PairHead(nn.Module):
    """hidden [b, s, h] -> hidden for the masked LM [b, s, h], and the logits of "in order" and "swapped" [b, 2].

    Sentence order is predicted from the first token, [CLS].
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        h = config.hidden_size
        self.layout, self.sequence_dim = layout, config.sequence_dim
        self.gelu = gelu(config)
        self.dense = ReplicatedLinear(config, "words.dense", h, h)
        self.layernorm = hidden_norm(config, layout)
        self.pooler = ReplicatedLinear(config, "order.pooler", h, h)
        self.order = ReplicatedLinear(config, "order.head", h, 2)
        if layout.sequence_parallel:
            for parameter in self.dense.parameters():
                all_reduce_gradient(parameter, layout.tensor_group)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pooled = torch.tanh(self.pooler(first_token(hidden, self.layout, self.sequence_dim)))
        return self.layernorm(self.gelu(self.dense(hidden))), self.order(pooled)


def words_to_logits(embedding: PairEmbedding, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """hidden [b, s, h] -> logits [b, s, v/t]; passes on the sentence order logits [b, 2]."""
    hidden, order = outputs
    return to_logits(embedding, hidden), order


class WordBias(nn.Module):
    """Adds a bias per vocabulary entry to the logits [b, s, v/t]; passes on the sentence order logits."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        rows = config.padded_vocab_size // layout.tensor_group.size()
        self.word_bias = mark_sharded(nn.Parameter(torch.zeros(rows)), dim=0)

    def forward(self, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, order = outputs
        return logits + self.word_bias, order


class ClassifierHead(nn.Module):
    """hidden [b, s, h] -> logits [b, c]: pooler on the first token, [CLS], then dropout and a linear layer."""

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


class ReplicatedLinear(nn.Module):
    """A linear layer replicated on every rank, y = x W^T + b: [.., i] -> [.., o]."""

    def __init__(self, config: ModelConfig, name: str, input_size: int, output_size: int):
        super().__init__()
        self.weight = nn.Parameter(weight(config, name).draw((output_size, input_size)))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
