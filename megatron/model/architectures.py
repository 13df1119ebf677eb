"""The specs of GPT-2, BERT and BERT with a classifier as its head. No torch here.

h hidden, f inside the MLP, v padded vocabulary
"""

from dataclasses import replace

from megatron.config import ModelConfig
from megatron.model.spec import (
    ARCHITECTURES,
    ArchitectureSpec,
    KeptActivations,
    LayerSpec,
    ParameterSpec,
    architecture_of,
    column_parallel,
    norm_parameters,
    register,
    replicated_linear,
    row_parallel,
)

__all__ = ["ARCHITECTURES", "BERT", "CLASSIFIER", "GPT2", "architecture_of"]

EMBED = "embed"
"""Key of the layers that share the word embedding: the first, and the head."""


def transformer_layer(config: ModelConfig) -> LayerSpec:
    """``ParallelTransformerLayer``. Kept: inputs of norms and linears, query, key, value, context, GELU's input."""
    h, f = config.hidden_size, config.ffn_hidden_size
    parameters = (
        *norm_parameters("input_layernorm", h),
        *column_parallel("attention.query_key_value", h, 3 * h),
        *row_parallel("attention.dense", h, h),
        *norm_parameters("post_attention_layernorm", h),
        *column_parallel("mlp.dense_h_to_4h", h, f),
        *row_parallel("mlp.dense_4h_to_h", f, h),
    )
    kept = KeptActivations(residual=2 * h, local=2 * h, masks=2 * h, statistics=4, sharded=4 * h + 2 * f)
    return LayerSpec(
        "ParallelTransformerLayer", parameters, 2 * (4 * h * h + 2 * h * f), attention_size=h, kept=kept, is_block=True
    )


def word_embedding(config: ModelConfig, class_name: str = "WordEmbedding") -> LayerSpec:
    """The table of tokens. Kept: the tokens, and which of them another tensor-parallel rank looks up."""
    table = ParameterSpec(
        "word_embeddings.weight", (config.padded_vocab_size, config.hidden_size), shard_dim=0, is_vocabulary=True
    )
    return LayerSpec(class_name, (table,), kept=KeptActivations(index_bytes=9), tied=EMBED)


def word_logits(config: ModelConfig, class_name: str = "WordEmbedding") -> LayerSpec:
    """The same table as the output projection. Kept: its input; the logits are counted with the loss."""
    h, table = config.hidden_size, word_embedding(config, class_name)
    return replace(table, matmul_flops=2 * table.numel, kept=KeptActivations(local=h))


def position_embedding(config: ModelConfig) -> LayerSpec:
    """The table of positions. Kept: the mask of the dropout that follows."""
    h = config.hidden_size
    table = ParameterSpec("position_embeddings.weight", (config.max_position_embeddings, h))
    return LayerSpec("PositionEmbedding", (table,), kept=KeptActivations(masks=h))


def final_norm(config: ModelConfig) -> LayerSpec:
    """The layer norm after the last block. Kept: its input."""
    h = config.hidden_size
    return LayerSpec("LayerNorm", norm_parameters("", h), kept=KeptActivations(residual=h, statistics=2))


WITHOUT_SEGMENT_IDS = LayerSpec("without_segment_ids")


def _gpt2(config: ModelConfig) -> list[LayerSpec]:
    return [
        word_embedding(config),
        position_embedding(config),
        *[transformer_layer(config)] * config.num_layers,
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
        word_logits(config),
    ]


def _bert(config: ModelConfig) -> list[LayerSpec]:
    bias = ParameterSpec("word_bias", (config.padded_vocab_size,), 0, weight_decay=False, is_vocabulary=True)
    return [
        *_encoder(config),
        _pair_head(config),
        word_logits(config, "PairEmbedding"),
        LayerSpec("WordBias", (bias,)),
    ]


def _encoder(config: ModelConfig) -> list[LayerSpec]:
    """BERT without its head."""
    table = ParameterSpec("tokentype_embeddings.weight", (2, config.hidden_size))
    return [
        word_embedding(config, "PairEmbedding"),
        LayerSpec("TokenTypeEmbedding", (table,)),
        position_embedding(config),
        *[transformer_layer(config)] * config.num_layers,
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
    ]


def _pair_head(config: ModelConfig) -> LayerSpec:
    """``PairHead``. Kept: input and output of its linear and of GELU; the pooler sees one token of each sample."""
    h = config.hidden_size
    parameters = (
        *replicated_linear("dense", h, h),
        *norm_parameters("layernorm", h),
        *replicated_linear("pooler", h, h),
        *replicated_linear("order", h, 2),
    )
    return LayerSpec("PairHead", parameters, 2 * h * h, kept=KeptActivations(local=3 * h, statistics=2))


def _classifier(config: ModelConfig) -> list[LayerSpec]:
    """BERT's layers with another head, whose pooler has the place and the name of the pretrained one."""
    h = config.hidden_size
    parameters = (*replicated_linear("pooler", h, h), *replicated_linear("classifier", h, len(config.classes)))
    return [*_encoder(config), LayerSpec("ClassifierHead", parameters)]


GPT2 = register(
    ArchitectureSpec(
        "GPT-2",
        "pretrain_gpt2.py",
        ("GPT2BPETokenizer", "WhitespaceTokenizer"),
        _gpt2,
        torch_layers="megatron.model.gpt2:gpt2_layers",
        torch_loss="megatron.model.gpt2:gpt2_loss",
    )
)
BERT = register(
    ArchitectureSpec(
        "BERT",
        "pretrain_bert.py",
        ("BertWordPieceLowerCase", "BertWordPieceCase"),
        _bert,
        torch_layers="megatron.model.bert:bert_layers",
        torch_loss="megatron.model.bert:BertLoss",
        masked_lm=True,
    )
)
CLASSIFIER = register(
    ArchitectureSpec(
        "BERT classifier",
        "tasks/main.py",
        BERT.tokenizers,
        _classifier,
        torch_layers="megatron.model.classifier:classifier_layers",
        torch_loss="megatron.model.classifier:classifier_loss",
        masked_lm=None,
    )
)
