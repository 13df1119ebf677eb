"""Specs of BERT and of BERT with a classifier head. No torch here."""

from dataclasses import replace

from megatron.config import ModelConfig
from megatron.model.architectures.layers import (
    WITHOUT_SEGMENT_IDS,
    final_norm,
    norm_parameters,
    positions,
    replicated_linear,
    transformer_layer,
    word_embedding,
    word_logits,
)
from megatron.model.spec import ArchitectureSpec, KeptActivations, LayerSpec, ParameterSpec

PAIRS = "megatron.model.embedding:PairEmbedding"


def _bert(config: ModelConfig) -> list[LayerSpec]:
    """tokens and token types [b, 2, s] -> logits [b, s, v/t], and the logits of sentence order prediction [b, 2]."""
    bias = ParameterSpec("word_bias", (config.padded_vocab_size,), 0, weight_decay=False, is_vocabulary=True)
    return [
        *_encoder(config),
        _pair_head(config),
        replace(word_logits(config, PAIRS), forward="megatron.model.heads:words_to_logits"),
        LayerSpec("megatron.model.heads:WordBias", parameters=(bias,)),
    ]


def _encoder(config: ModelConfig) -> list[LayerSpec]:
    """BERT without its head: tokens and token types [b, 2, s] -> hidden [b, s, h].

    Padding is a segment of its own, so that sentences do not attend to it.
    """
    table = ParameterSpec("tokentype_embeddings.weight", (2, config.hidden_size))
    return [
        word_embedding(config, PAIRS),
        LayerSpec("megatron.model.embedding:TokenTypeEmbedding", parameters=(table,)),
        positions(config, passes_segment_ids=True),
        *[replace(transformer_layer(config), arguments={"causal": False})] * config.num_layers,
        WITHOUT_SEGMENT_IDS,
        final_norm(config),
    ]


def _pair_head(config: ModelConfig) -> LayerSpec:
    """Heads of masked LM and sentence order.

    Kept: input and output of the dense layer and of GELU. The pooler reads one token of each sample.
    """
    h = config.hidden_size
    parameters = (
        *replicated_linear("dense", h, h),
        *norm_parameters("layernorm", h),
        *replicated_linear("pooler", h, h),
        *replicated_linear("order", h, 2),
    )
    return LayerSpec(
        "megatron.model.heads:PairHead",
        parameters=parameters,
        matmul_flops=2 * h * h,
        kept=KeptActivations(local=3 * h, statistics=2),
    )


def _classifier(config: ModelConfig) -> list[LayerSpec]:
    """BERT with a classifier head; its pooler has the index and name of the pretrained pooler, to load its weights."""
    h = config.hidden_size
    parameters = (*replicated_linear("pooler", h, h), *replicated_linear("classifier", h, len(config.classes)))
    return [*_encoder(config), LayerSpec("megatron.model.heads:ClassifierHead", parameters=parameters)]


BERT = ArchitectureSpec(
    "BERT",
    "pretrain_bert.py",
    ("BertWordPieceLowerCase", "BertWordPieceCase"),
    _bert,
    loss="megatron.model.loss:BertLoss",
    masked_lm=True,
)
CLASSIFIER = ArchitectureSpec(
    "BERT classifier",
    "tasks/main.py",
    BERT.tokenizers,
    _classifier,
    loss="megatron.model.loss:classifier_loss",
    masked_lm=None,
)
