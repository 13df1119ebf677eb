"""The list of layers of the toy architecture."""

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.model.containers import Layers
from megatron.model.embedding import PositionEmbedding, without_segment_ids
from megatron.model.kernels import norm_class, weight
from megatron.model.transformer import ParallelTransformerLayer
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
    def __init__(self, config: ModelConfig):
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


def toy_layers(config: ModelConfig, layout: ParallelLayout) -> Layers:
    return [
        LayerSpec(ToyEmbedding, config, layout),
        LayerSpec(PositionEmbedding, config, layout, passes_segment_ids=False),
        *(LayerSpec(ParallelTransformerLayer, config, layout, layer_number=n + 1) for n in range(config.num_layers)),
        without_segment_ids,
        LayerSpec(norm_class(config, layout), config.hidden_size, eps=config.layernorm_epsilon),
        LayerSpec(Scale, config),
        LayerSpec(ToyHead, config, layout),
    ]
