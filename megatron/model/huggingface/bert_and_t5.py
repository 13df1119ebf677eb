"""BERT and T5 1.1 in Hugging Face's formats ``megatron-bert`` and ``t5``; see ``formats``. No torch here."""

from collections.abc import Mapping
from typing import Any

from megatron.common.errors import shown
from megatron.config import ModelConfig
from megatron.model.architectures import BERT, CLASSIFIER, T5
from megatron.model.huggingface.formats import RESIDUAL, Fields, Format, gelu_name, named, read_end, read_gelu
from megatron.model.spec import LayerSpec

BERT_CLASSES = {BERT.name: "MegatronBertForPreTraining", CLASSIFIER.name: "MegatronBertForSequenceClassification"}
T5_SHAPE = ("decoder_num_layers", "geglu", "relative_attention_num_buckets", "relative_attention_max_distance")
"""Flags that determine the weights of T5 only."""
_POSITIONS = 512
"""Sequence length of T5's encoder and decoder, which config.json does not state."""


def _read_bert(tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    fields, problems = read_gelu("hidden_act", tree.get("hidden_act", "gelu"))
    return fields | {"architecture": BERT.name}, problems


def _write_bert(config: ModelConfig) -> dict[str, Any]:
    labels = dict(enumerate(config.classes))
    return {
        "architectures": [BERT_CLASSES[config.architecture]],
        "hidden_act": gelu_name(config),
        **({"id2label": labels, "label2id": {label: n for n, label in labels.items()}} if labels else {}),
    }


BERT_FORMAT = Format(
    title="Megatron-BERT",
    sizes={
        "num_layers": ("num_hidden_layers", 24),
        "hidden_size": ("hidden_size", 1024),
        "ffn_hidden_size": ("intermediate_size", 4096),
        "num_attention_heads": ("num_attention_heads", 16),
        "max_position_embeddings": ("max_position_embeddings", 512),
        "vocab_size": ("vocab_size", 29056),
    },
    numbers={
        "layernorm_epsilon": ("layer_norm_eps", 1e-12),
        "hidden_dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
        "init_method_std": ("initializer_range", 0.02),
    },
    fixed={
        "model_type": "megatron-bert",
        "architectures": [BERT_CLASSES[BERT.name]],
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    read=_read_bert,
    missing=lambda config: {
        "heads of hidden size / heads": config.head_size * config.num_attention_heads != config.hidden_size,
        RESIDUAL: config.apply_residual_connection_post_layernorm,
    },
    write=_write_bert,
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    names=named(
        "bert.encoder.layer",
        {
            "input_layernorm": ("attention.ln",),
            "attention.query_key_value": ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.dense": ("attention.output.dense",),
            "post_attention_layernorm": ("ln",),
            "mlp.dense_h_to_4h": ("intermediate.dense",),
            "mlp.dense_4h_to_h": ("output.dense",),
        },
        {
            "word_embeddings": "bert.embeddings.word_embeddings",
            "tokentype_embeddings": "bert.embeddings.token_type_embeddings",
            "position_embeddings": "bert.embeddings.position_embeddings",
            "": "bert.encoder.ln",
            "pooler": "bert.pooler.dense",
            "dense": "cls.predictions.transform.dense",
            "layernorm": "cls.predictions.transform.LayerNorm",
            "order": "cls.seq_relationship",
            "classifier": "classifier",
        },
    ),
)


def _read_t5(tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    problems = []
    if "feed_forward_proj" not in tree:
        problems.append("feed_forward_proj is 'relu', and only 'gated-gelu' can be taken over")
    # transformers 5 writes tie_word_embeddings true for all models; scale_decoder_outputs tells T5 1.1 apart.
    if tree.get("scale_decoder_outputs", tree.get("tie_word_embeddings", True)):
        problems.append("tie_word_embeddings is true, and only T5 1.1, with an untied head, can be taken over")
    start, size = tree.get("decoder_start_token_id"), tree.get("vocab_size")
    if start is not None and not (type(start) is int and -1 <= start < (size if type(size) is int else start + 1)):
        problems.append(f"decoder_start_token_id is {shown(start)}, and the model has {shown(size)} tokens")
    return {
        "architecture": T5.name,
        "max_position_embeddings": _POSITIONS,
        "encoder_seq_length": _POSITIONS,
        "decoder_seq_length": _POSITIONS,
        "normalization": "RMSNorm",
        "position_embedding_type": "relative",
        "geglu": True,
        "openai_gelu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "decoder_start_token": start if type(start) is int else 0,
        **{"eod_token": 1, **read_end(tree)},
    }, problems


def _derive_t5(values: Fields) -> Fields:
    encoder = values["encoder_num_layers"]
    decoder = values["decoder_num_layers"] or encoder
    return {
        "decoder_num_layers": decoder,
        "num_layers": encoder + decoder,
        "attention_dropout": values["hidden_dropout"],
    }


def _t5_names(config: ModelConfig, block: int, layer: LayerSpec, module: str) -> list[str]:
    in_encoder = block < config.encoder_num_layers
    stack = f"encoder.block.{block}" if in_encoder else f"decoder.block.{block - config.encoder_num_layers}"
    if layer.class_name == "RelativePositions":
        return [f"{stack}.layer.0.SelfAttention.relative_attention_bias"]
    if not layer.is_block:
        return [_T5_OTHER_LAYERS[layer.class_name]]
    if module in _T5_MLP:
        return [f"{stack}.layer.{1 if in_encoder else 2}.{name}" for name in _T5_MLP[module]]
    return [f"{stack}.layer.{name}" for name in _T5_ATTENTION[module]]


_T5_ATTENTION = {
    "input_layernorm": ("0.layer_norm",),
    "attention.query_key_value": ("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"),
    "attention.dense": ("0.SelfAttention.o",),
    "post_attention_layernorm": ("1.layer_norm",),
    "inter_attention.query": ("1.EncDecAttention.q",),
    "inter_attention.key_value": ("1.EncDecAttention.k", "1.EncDecAttention.v"),
    "inter_attention.dense": ("1.EncDecAttention.o",),
    "post_inter_attention_layernorm": ("2.layer_norm",),
}
_T5_MLP = {
    "mlp.dense_h_to_4h": ("DenseReluDense.wi_0", "DenseReluDense.wi_1"),
    "mlp.dense_4h_to_h": ("DenseReluDense.wo",),
}
_T5_OTHER_LAYERS = {
    "T5Embedding": "shared",
    "EncoderNorm": "encoder.final_layer_norm",
    "RMSNorm": "decoder.final_layer_norm",
    "OutputLayer": "lm_head",
}
"""Class of a layer that is not a transformer layer to its module in Hugging Face files."""

T5_FORMAT = Format(
    title="T5 1.1",
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    sizes={
        "encoder_num_layers": ("num_layers", 6),
        "decoder_num_layers": ("num_decoder_layers", 0),
        "hidden_size": ("d_model", 512),
        "kv_channels": ("d_kv", 64),
        "ffn_hidden_size": ("d_ff", 2048),
        "num_attention_heads": ("num_heads", 8),
        "relative_attention_num_buckets": ("relative_attention_num_buckets", 32),
        "relative_attention_max_distance": ("relative_attention_max_distance", 128),
        "vocab_size": ("vocab_size", 32128),
    },
    numbers={"layernorm_epsilon": ("layer_norm_epsilon", 1e-6), "hidden_dropout": ("dropout_rate", 0.1)},
    fixed={
        "model_type": "t5",
        "feed_forward_proj": "gated-gelu",
        "is_gated_act": True,  # transformers prefers these two to feed_forward_proj
        "dense_act_fn": "gelu_new",
        "is_encoder_decoder": True,
    },
    multiple=None,
    keeps_rows=True,
    read=_read_t5,
    further={"eod_token": "eos_token_id"},
    derive=_derive_t5,
    missing=lambda config: {
        "--normalization RMSNorm": config.normalization != "RMSNorm",
        "--position-embedding-type relative": not config.has_relative_positions,
        "--geglu": not config.geglu,
        "--openai-gelu": not config.openai_gelu,
        "--disable-bias-linear": not config.disable_bias_linear,
        "--untie-embeddings-and-output-weights": not config.untie_embeddings_and_output_weights,
    },
    write=lambda config: {
        "architectures": ["T5ForConditionalGeneration"],
        "d_kv": config.head_size,
        "tie_word_embeddings": False,
        "decoder_start_token_id": config.decoder_start_token,
        "pad_token_id": max(config.decoder_start_token, 0),
        "eos_token_id": config.eod_token,
    },
    tied={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    names=_t5_names,
)
