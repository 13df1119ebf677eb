"""Spec of GPT-2, and of the Llama family with or without experts, which flags select. No torch here."""

from dataclasses import replace

from megatron.common.tokenizer_files import GPT2_BPE, PUBLISHED
from megatron.config import ModelConfig
from megatron.model.architectures.layers import (
    WITHOUT_SEGMENT_IDS,
    final_norm,
    moe_layer,
    output_layer,
    positions,
    transformer_layer,
    word_embedding,
    word_logits,
)
from megatron.model.spec import ArchitectureSpec, LayerSpec


def _gpt2(config: ModelConfig) -> list[LayerSpec]:
    """tokens [b, s] -> hidden [b, s, h] -> logits [b, s, v/t]."""
    untied, embedding = config.untie_embeddings_and_output_weights, word_embedding(config)
    return [
        replace(embedding, tied=None) if untied else embedding,
        positions(config, passes_segment_ids=config.layers_need_segment_ids),
        *_blocks(config),
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
        output_layer(config) if untied else word_logits(config),
    ]


def _blocks(config: ModelConfig) -> list[LayerSpec]:
    if not config.has_experts:
        return [transformer_layer(config)] * config.num_layers
    dense, experts = transformer_layer(config), moe_layer(config)
    return [experts if config.layer_has_experts(n + 1) else dense for n in range(config.num_layers)]


GPT2 = ArchitectureSpec(
    "GPT-2",
    "pretrain_gpt2.py",
    (GPT2_BPE, "WhitespaceTokenizer", *PUBLISHED),
    _gpt2,
    loss="megatron.model.loss:lm_loss",
)
