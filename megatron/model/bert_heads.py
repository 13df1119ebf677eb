"""What BERT has behind its last layer norm.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.initial_weights import weight
from megatron.model.kernels import gelu
from megatron.model.sequence import first_token, stream_norm_class
from megatron.mpu.initialization import mark_sharded, sum_gradient
from megatron.mpu.layout import ParallelLayout


class PairHead(nn.Module):
    """hidden [b, s, h] -> hidden for the words [b, s, h], and the logits of "in order" and "swapped" [b, 2].

    The order is read from the first token, which is [CLS].
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        h = config.hidden_size
        self.layout, self.sequence_dim = layout, config.sequence_dim
        self.gelu = gelu(config)
        self.dense = WholeLinear(config, "words.dense", h, h)
        self.layernorm = stream_norm_class(config, layout)(h, eps=config.layernorm_epsilon)
        self.pooler = WholeLinear(config, "order.pooler", h, h)
        self.order = WholeLinear(config, "order.head", h, 2)
        if layout.sequence_parallel:
            for parameter in self.dense.parameters():
                sum_gradient(parameter, layout.tensor_group)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pooled = torch.tanh(self.pooler(first_token(hidden, self.layout, self.sequence_dim)))
        return self.layernorm(self.gelu(self.dense(hidden))), self.order(pooled)


class WordBias(nn.Module):
    """Adds a bias for each word to its logits: [b, s, v/t], beside the logits of the order."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        rows = config.padded_vocab_size // layout.tensor_group.size()
        self.word_bias = mark_sharded(nn.Parameter(torch.zeros(rows)), dim=0)

    def forward(self, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, order = outputs
        return logits + self.word_bias, order


class WholeLinear(nn.Module):
    """y = x W^T + b, whole on every rank: [.., i] -> [.., o]."""

    def __init__(self, config: ModelConfig, name: str, input_size: int, output_size: int):
        super().__init__()
        self.weight = nn.Parameter(weight(config, name).draw((output_size, input_size)))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
