"""The modules of the toy architecture."""

import torch
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.weights import weight
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import VocabParallelEmbedding


def _table(config: ModelConfig, layout: ParallelLayout, name: str) -> VocabParallelEmbedding:
    sizes = {"padded_size": config.padded_vocab_size, "group": layout.tensor_group}
    return VocabParallelEmbedding(config.vocab_size, config.hidden_size, init=weight(config, name), **sizes)


class ToyEmbedding(nn.Module):
    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.words = _table(config, layout, "words")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens)


class Scale(nn.Module):
    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class ToyHead(nn.Module):
    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        self.output = _table(config, layout, "output")

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output.logits(hidden)
