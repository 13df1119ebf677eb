"""The specs of BERT, and of BERT with a classifier as its head. No torch here."""

from megatron.config import ModelConfig
from megatron.model.architectures.layers import (
    WITHOUT_SEGMENT_IDS,
    final_norm,
    position_embedding,
    transformer_layer,
    word_embedding,
    word_logits,
)
from megatron.model.spec import (
    ArchitectureSpec,
    KeptActivations,
    LayerSpec,
    ParameterSpec,
    norm_parameters,
    replicated_linear,
)


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


BERT = ArchitectureSpec(
    "BERT",
    "pretrain_bert.py",
    ("BertWordPieceLowerCase", "BertWordPieceCase"),
    _bert,
    torch_layers="megatron.model.bert:bert_layers",
    torch_loss="megatron.model.bert:BertLoss",
    masked_lm=True,
)
CLASSIFIER = ArchitectureSpec(
    "BERT classifier",
    "tasks/main.py",
    BERT.tokenizers,
    _classifier,
    torch_layers="megatron.model.classifier:classifier_layers",
    torch_loss="megatron.model.classifier:classifier_loss",
    masked_lm=None,
)
