"""GPT-2's list of layers, and its loss.

b batch, s sequence, h hidden, v padded vocabulary, t tensor-parallel size
"""

from functools import partial

from deepspeed.pipe import LayerSpec, TiedLayerSpec

from megatron.config import ActivationConfig, ModelConfig
from megatron.model.containers import Layers, LossFn, SequentialModel
from megatron.model.embedding import PositionEmbedding, WordEmbedding, to_logits, without_segment_ids
from megatron.model.kernels import norm_class
from megatron.model.loss import lm_loss
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout


def gpt2_layers(config: ModelConfig, layout: ParallelLayout) -> Layers:
    """The layers of GPT-2 in order, not yet built; the same list as in its spec."""
    embedding = partial(
        TiedLayerSpec, "embed", WordEmbedding, config, layout, tied_weight_attr="word_embeddings.weight"
    )
    return [
        embedding(),  # tokens [b, s] -> hidden [b, s, h]
        LayerSpec(PositionEmbedding, config, layout, passes_segment_ids=config.reset_attention_mask),
        *(LayerSpec(ParallelTransformerLayer, config, layout, layer_number=n + 1) for n in range(config.num_layers)),
        without_segment_ids,
        LayerSpec(norm_class(config, layout), config.hidden_size, eps=config.layernorm_epsilon),
        embedding(forward_fn=to_logits),  # hidden -> logits [b, s, v/t]
    ]


def gpt2_loss(config: ModelConfig, layout: ParallelLayout) -> LossFn:
    """logits [b, s, v/t], and labels and weights [b, s] -> the loss."""
    return partial(
        lm_loss,
        sequence_group=layout.sequence_group,
        group=layout.tensor_group,
        vocab_size=config.vocab_size,
        in_fp32=not config.fp16_lm_cross_entropy,
    )


class GPT2Model(SequentialModel):
    """GPT-2 without pipeline stages."""

    def __init__(self, config: ModelConfig, activation: ActivationConfig, layout: ParallelLayout):
        super().__init__(gpt2_layers(config, layout), gpt2_loss(config, layout), activation)
