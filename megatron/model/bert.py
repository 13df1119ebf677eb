"""BERT's list of layers, and its loss: masked tokens, and the order of two sentences.

The network of Megatron's BERT: layer norms in front of attention and MLP, one after the last layer, none after
the embeddings.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size
"""

from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional as F

from megatron.config import ModelConfig
from megatron.model.containers import Layers
from megatron.model.embedding import (
    PairEmbedding,
    PositionEmbedding,
    TokenTypeEmbedding,
    to_logits,
    without_segment_ids,
)
from megatron.model.gpt2 import gpt2_loss, without_gradient_unless_finite
from megatron.model.kernels import gelu, norm_class, weight
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import first_token
from megatron.parallel.tensor.layers import all_reduce_gradient, mark_sharded
from megatron.parallel.tensor.linear import linear


class PairHead(nn.Module):
    """hidden [b, s, h] -> hidden for the masked LM [b, s, h], and the logits of "in order" and "swapped" [b, 2].

    The order is read from the first token, which is [CLS].
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        h = config.hidden_size
        self.layout, self.sequence_dim = layout, config.sequence_dim
        self.gelu = gelu(config)
        self.dense = ReplicatedLinear(config, "words.dense", h, h)
        self.layernorm = norm_class(config, layout)(h, eps=config.layernorm_epsilon)
        self.pooler = ReplicatedLinear(config, "order.pooler", h, h)
        self.order = ReplicatedLinear(config, "order.head", h, 2)
        if layout.sequence_parallel:
            for parameter in self.dense.parameters():
                all_reduce_gradient(parameter, layout.tensor_group)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pooled = torch.tanh(self.pooler(first_token(hidden, self.layout, self.sequence_dim)))
        return self.layernorm(self.gelu(self.dense(hidden))), self.order(pooled)


class WordBias(nn.Module):
    """Adds a bias per token of the vocabulary to the logits [b, s, v/t]; passes on the logits of the order."""

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        super().__init__()
        rows = config.padded_vocab_size // layout.tensor_group.size()
        self.word_bias = mark_sharded(nn.Parameter(torch.zeros(rows)), dim=0)

    def forward(self, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits, order = outputs
        return logits + self.word_bias, order


class ReplicatedLinear(nn.Module):
    """y = x W^T + b, replicated on every rank: [.., i] -> [.., o]."""

    def __init__(self, config: ModelConfig, name: str, input_size: int, output_size: int):
        super().__init__()
        self.weight = nn.Parameter(weight(config, name).draw((output_size, input_size)))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def bert_layers(config: ModelConfig, layout: ParallelLayout) -> Layers:
    """The layers of BERT in order, not yet built; the same list as in its spec."""
    return [
        *encoder_layers(config, layout),
        LayerSpec(PairHead, config, layout),  # hidden -> hidden for the masked LM, logits of the order [b, 2]
        pair_embedding(config, layout, forward_fn=words_to_logits),  # -> logits [b, s, v/t], logits of the order [b, 2]
        LayerSpec(WordBias, config, layout),
    ]


def encoder_layers(config: ModelConfig, layout: ParallelLayout) -> Layers:
    """BERT without its head: tokens and token types [b, 2, s] -> hidden [b, s, h].

    Padding is a segment of its own, so the sentences do not attend to it.
    """
    layer = partial(LayerSpec, ParallelTransformerLayer, config, layout, causal=False)
    return [
        pair_embedding(config, layout),  # -> hidden [b, s, h], token types [b, s]
        LayerSpec(TokenTypeEmbedding, config, layout),  # -> hidden, segment ids [b, s]
        LayerSpec(PositionEmbedding, config, layout, passes_segment_ids=True),
        *(layer(layer_number=n + 1) for n in range(config.num_layers)),
        without_segment_ids,
        LayerSpec(norm_class(config, layout), config.hidden_size, eps=config.layernorm_epsilon),
    ]


def pair_embedding(config: ModelConfig, layout: ParallelLayout, **options: Any) -> TiedLayerSpec:
    """The word embedding, not yet built; with ``forward_fn`` another use of it."""
    return TiedLayerSpec("embed", PairEmbedding, config, layout, tied_weight_attr="word_embeddings.weight", **options)


def words_to_logits(embedding: PairEmbedding, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """hidden [b, s, h] -> logits [b, s, v/t], and the logits of the order."""
    hidden, order = outputs
    return to_logits(embedding, hidden), order


class BertLoss:
    """The weighted sum of the masked tokens' cross entropies, plus the mean cross entropy of the sentences' order.

    loss(outputs, targets): both logits; and labels [b, s], weights [b, s] and whether sentences were swapped [b].
    """

    def __init__(self, config: ModelConfig, layout: ParallelLayout):
        self._words_loss = gpt2_loss(config, layout)
        self.parts = {"masked_lm_loss": torch.zeros(()), "sop_loss": torch.zeros(())}
        """Both terms of the last loss, [], as they are logged; Megatron-LM calls them "lm loss" and "sop loss"."""

    def __call__(self, outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, ...]) -> Tensor:
        (logits, order), (labels, weights, swapped) = outputs, targets
        words, order_loss = self._words_loss(logits, (labels, weights)), F.cross_entropy(order.float(), swapped)
        self.parts = {"masked_lm_loss": words.detach(), "sop_loss": order_loss.detach()}
        return without_gradient_unless_finite(words + order_loss)
