"""The list of layers of a causal language model such as GPT-2 or Llama, and its loss.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size
"""

from functools import partial

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor

from megatron.config import ActivationConfig, ModelConfig
from megatron.model.containers import Layers, LossFn, SequentialModel
from megatron.model.embedding import (
    EmbeddingDropout,
    OutputLayer,
    PositionEmbedding,
    WordEmbedding,
    to_logits,
    without_segment_ids,
)
from megatron.model.kernels import norm_class
from megatron.model.moe import MoEParallelTransformerLayer
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import sequence_shard
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy


def gpt2_layers(config: ModelConfig, layout: ParallelLayout) -> Layers:
    """The layers in order, not yet built; the same list as in the spec."""
    embedding = partial(
        TiedLayerSpec, "embed", WordEmbedding, config, layout, tied_weight_attr="word_embeddings.weight"
    )
    words, head = embedding(), embedding(forward_fn=to_logits)
    if config.untie_embeddings_and_output_weights:
        words, head = LayerSpec(WordEmbedding, config, layout), LayerSpec(OutputLayer, config, layout)
    positions = PositionEmbedding if config.has_position_table else EmbeddingDropout
    return [
        words,  # tokens [b, s] -> hidden [b, s, h]
        LayerSpec(positions, config, layout, passes_segment_ids=config.layers_need_segment_ids),
        *(LayerSpec(layer_class(config, n + 1), config, layout, layer_number=n + 1) for n in range(config.num_layers)),
        without_segment_ids,
        LayerSpec(norm_class(config, layout), config.hidden_size, eps=config.layernorm_epsilon),
        head,  # hidden -> logits [b, s, v/t]
    ]


def layer_class(config: ModelConfig, layer_number: int) -> type[ParallelTransformerLayer]:
    """The class of the transformer layer of this number: with a mixture of experts, or with an MLP."""
    return MoEParallelTransformerLayer if config.layer_has_experts(layer_number) else ParallelTransformerLayer


def gpt2_loss(config: ModelConfig, layout: ParallelLayout) -> LossFn:
    """The weighted sum of the tokens' cross entropies. If it is not finite, neither is any gradient.

    loss(logits [b, s, v/t], (labels, weights)): labels [b, s], and weights [b, s] that add up to 1 over the tokens of
    the global batch. With a sequence group the logits are of this rank's shard; the loss is the mean over the group.
    """
    sequence_group = layout.sequence_group

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
            compiled=config.compile and logits.is_cuda,
        )
        return without_gradient_unless_finite((losses.float() * weights).sum())

    return loss


def without_gradient_unless_finite(loss: Tensor) -> Tensor:
    """``loss``, with gradients that are all NaN if it is not finite: an infinite loss can have finite gradients."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


class GPT2Model(SequentialModel):
    """GPT-2 without pipeline stages."""

    def __init__(self, config: ModelConfig, activation: ActivationConfig, layout: ParallelLayout):
        super().__init__(gpt2_layers(config, layout), gpt2_loss(config, layout), activation)
