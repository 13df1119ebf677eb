"""Spec of T5, an encoder-decoder model. No torch here."""

from dataclasses import replace
from fractions import Fraction

from megatron.common.tokenizer_files import HUGGINGFACE
from megatron.config import ModelConfig
from megatron.model.architectures.bert import BERT
from megatron.model.architectures.layers import (
    column_parallel,
    final_norm,
    norm_parameters,
    output_layer,
    positions,
    row_parallel,
    transformer_layer,
    word_embedding,
    word_logits,
)
from megatron.model.spec import ArchitectureSpec, KeptActivations, LayerSpec, ParameterSpec, times

T5_LAYERS = "megatron.model.t5"


def _t5(config: ModelConfig) -> list[LayerSpec]:
    """tokens of encoder and decoder [b, s + r] -> logits of the decoder [b, r, v/t].

    All costs are per encoder token, also those of decoder layers, which process r/s as many tokens.
    """
    untied, embedding = config.untie_embeddings_and_output_weights, word_embedding(config, f"{T5_LAYERS}:T5Embedding")
    ratio = _decoder_tokens(config)
    norm = final_norm(config)
    head = output_layer(config) if untied else word_logits(config, embedding.module)
    return [
        embedding,
        _stack_positions(config),
        *_stack(config, encoder_layer(config), config.encoder_num_layers, "encoder"),
        replace(
            norm,
            module=f"{T5_LAYERS}:encoder_norm",
            name="EncoderNorm",
            kept=replace(norm.kept, local=config.hidden_size),
        ),
        replace(embedding, kept=times(embedding.kept, ratio)),
        _stack_positions(config, ratio),
        *_stack(config, decoder_layer(config), config.decoder_num_layers, "decoder"),
        LayerSpec(forward=f"{T5_LAYERS}:without_encoder_output"),
        replace(norm, kept=times(norm.kept, ratio)),
        replace(head, matmul_flops=round(head.matmul_flops * ratio), kept=times(head.kept, ratio)),
    ]


def encoder_layer(config: ModelConfig) -> LayerSpec:
    """An encoder layer, with bidirectional attention."""
    return transformer_layer(config, f"{T5_LAYERS}:EncoderParallelTransformerLayer")


def decoder_layer(config: ModelConfig) -> LayerSpec:
    """A decoder layer, with causal self-attention and cross-attention to the encoder's output."""
    h, q, ratio = config.hidden_size, config.num_attention_heads * config.head_size, _decoder_tokens(config)
    bias, norm, self_layer = config.linear_bias, config.normalization, transformer_layer(config)
    parameters = (
        *self_layer.parameters,
        *column_parallel("inter_attention.query", h, q, bias=bias),
        *column_parallel("inter_attention.key_value", h, 2 * q, bias=bias),
        *row_parallel("inter_attention.dense", q, h, bias=bias),
        *norm_parameters("post_inter_attention_layernorm", h, norm),
    )
    statistics = 2 if norm == "LayerNorm" else 1
    cross = KeptActivations(residual=h, local=h, masks=h, statistics=statistics, sharded=2 * q)
    both = KeptActivations(**{name: value + getattr(cross, name) for name, value in vars(self_layer.kept).items()})
    kept = times(both, ratio)
    return LayerSpec(
        f"{T5_LAYERS}:DecoderParallelTransformerLayer",
        parameters=parameters,
        matmul_flops=round(ratio * (self_layer.matmul_flops + 4 * h * q)) + 4 * h * q,
        repeated_flops=round(ratio * self_layer.repeated_flops),
        attention_size=round(q * (ratio * ratio + ratio)),
        cross_attention_size=round(q * ratio),
        kept=replace(kept, sharded=kept.sharded + 2 * q),
        is_block=True,
    )


def _stack(config: ModelConfig, layer: LayerSpec, count: int, name: str) -> list[LayerSpec]:
    """``count`` times ``layer``, each preceded by the shared relative position table, if there is one."""
    shape = (config.relative_attention_num_buckets, config.num_attention_heads)
    table = LayerSpec(
        f"{T5_LAYERS}:RelativePositions",
        arguments={"name": name, "causal": name == "decoder"},
        parameters=(ParameterSpec("weight", shape, shard_dim=1),),
        tied=f"{name}_positions",
    )
    return [*((table,) if config.has_relative_positions else ()), layer] * count


def _stack_positions(config: ModelConfig, ratio: Fraction = Fraction(1)) -> LayerSpec:
    """Position embedding and dropout of a stack; encoder and decoder share one position table."""
    layer, has_table = positions(config), config.has_position_table
    module = f"{T5_LAYERS}:{'StackPositions' if has_table else 'StackDropout'}"
    return replace(layer, module=module, tied="positions" if has_table else None, kept=times(layer.kept, ratio))


def _decoder_tokens(config: ModelConfig) -> Fraction:
    """Decoder tokens per encoder token."""
    return Fraction(config.decoder_seq_length or 1, config.encoder_seq_length or 1)


T5 = ArchitectureSpec(
    "T5",
    "pretrain_t5.py",
    (*BERT.tokenizers, HUGGINGFACE),
    _t5,
    loss="megatron.model.loss:lm_loss",
    masked_lm=True,
    is_encoder_decoder=True,
    # T5 1.1 (arXiv 1910.10683, and the notes on its release).
    defaults=(
        "--normalization", "RMSNorm", "--layernorm-epsilon", "1e-6", "--position-embedding-type", "relative",
        "--geglu", "--openai-gelu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
    ),
)  # fmt: skip
