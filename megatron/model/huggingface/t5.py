"""T5 1.1 and FLAN-T5 in Hugging Face's format: config.json to and from a ModelConfig, and the weights. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.architectures import T5
from megatron.model.huggingface.values import Shapes, our_parameters, read_values, vocabulary_problems

MODEL_TYPE, CLASS_NAME = "t5", "T5ForConditionalGeneration"
TIED = {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}
"""Names that files may have besides, to the weights that they repeat."""
SHAPE = ("decoder_num_layers", "geglu", "relative_attention_num_buckets", "relative_attention_max_distance")
"""Flags of the shape of a model that only T5 has."""
POSITIONS = 512
"""Tokens of encoder and decoder, of which a file says nothing."""

_SIZES = {
    "encoder_num_layers": ("num_layers", 6),
    "decoder_num_layers": ("num_decoder_layers", 6),
    "hidden_size": ("d_model", 512),
    "kv_channels": ("d_kv", 64),
    "ffn_hidden_size": ("d_ff", 2048),
    "num_attention_heads": ("num_heads", 8),
    "relative_attention_num_buckets": ("relative_attention_num_buckets", 32),
    "relative_attention_max_distance": ("relative_attention_max_distance", 128),
    "vocab_size": ("vocab_size", 32128),
}
_NUMBERS = {"layernorm_epsilon": ("layer_norm_epsilon", 1e-6), "hidden_dropout": ("dropout_rate", 0.1)}
_FIXED = {"model_type": MODEL_TYPE, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True}


def read_config(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that the config.json at ``path`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    sizes = _SIZES | {"decoder_num_layers": ("num_decoder_layers", tree.get("num_layers", 6))}
    present = {name: value for name, value in tree.items() if value is not None}  # of as many layers as the encoder
    values, problems = read_values(present, sizes, _NUMBERS, _FIXED)
    if "feed_forward_proj" not in tree:
        problems.append("feed_forward_proj is 'relu', and only 'gated-gelu' can be taken over")
    # transformers 5 writes that all models are tied, and says by the other setting whether one is T5 1.1.
    if tree.get("scale_decoder_outputs", tree.get("tie_word_embeddings", True)):
        problems.append("tie_word_embeddings is true, and only T5 1.1, with a head of its own, can be taken over")
    problems = problems or vocabulary_problems(values["vocab_size"], vocab_size)
    if problems:
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    start, end = tree.get("decoder_start_token_id"), tree.get("eos_token_id")
    return ModelConfig(
        **values,
        architecture=T5.name,
        num_layers=values["encoder_num_layers"] + values["decoder_num_layers"],
        padded_vocab_size=values["vocab_size"],
        attention_dropout=values["hidden_dropout"],
        max_position_embeddings=POSITIONS,
        encoder_seq_length=POSITIONS,
        decoder_seq_length=POSITIONS,
        normalization="RMSNorm",
        position_embedding_type="relative",
        geglu=True,
        openai_gelu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        decoder_start_token=start if type(start) is int else 0,
        eod_token=end if type(end) is int else 1,
    )


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32).

    Raises ConfigError with a line for each setting that Hugging Face's T5 1.1 does not have.
    """
    required = {
        "--normalization RMSNorm": config.normalization == "RMSNorm",
        "--position-embedding-type relative": config.has_relative_positions,
        "--geglu": config.geglu,
        "--openai-gelu": config.openai_gelu,
        "--disable-bias-linear": config.disable_bias_linear,
        "--untie-embeddings-and-output-weights": config.untie_embeddings_and_output_weights,
    }
    if not all(required.values()):
        raise ConfigError(
            f"the model was trained without {name}, which Hugging Face's T5 1.1 has; use merge"
            for name, is_so in required.items()
            if not is_so
        )
    return {
        "architectures": [CLASS_NAME],
        **_FIXED,
        **{name: getattr(config, field) for field, (name, _) in {**_SIZES, **_NUMBERS}.items()},
        "d_kv": config.head_size,
        "tie_word_embeddings": False,
        "decoder_start_token_id": config.decoder_start_token,
        "pad_token_id": max(config.decoder_start_token, 0),
        "eos_token_id": config.eod_token,
        "torch_dtype": dtype,
    }


_ATTENTION = {
    "input_layernorm": ("0.layer_norm",),
    "attention.query_key_value": ("0.SelfAttention.q", "0.SelfAttention.k", "0.SelfAttention.v"),
    "attention.dense": ("0.SelfAttention.o",),
    "post_attention_layernorm": ("1.layer_norm",),
    "inter_attention.query": ("1.EncDecAttention.q",),
    "inter_attention.key_value": ("1.EncDecAttention.k", "1.EncDecAttention.v"),
    "inter_attention.dense": ("1.EncDecAttention.o",),
    "post_inter_attention_layernorm": ("2.layer_norm",),
}
_MLP = {
    "mlp.dense_h_to_4h": ("DenseReluDense.wi_0", "DenseReluDense.wi_1"),
    "mlp.dense_4h_to_h": ("DenseReluDense.wo",),
}
_OTHERS = {
    "T5Embedding": "shared",
    "EncoderNorm": "encoder.final_layer_norm",
    "RMSNorm": "decoder.final_layer_norm",
    "OutputLayer": "lm_head",
}
"""Class of a layer outside the blocks to the module of its weight."""


def source_shapes(config: ModelConfig) -> Shapes:
    """Our name of each weight, in the order of the layers, to name and shape of the tensors that it consists of.

    Queries, keys and values are one weight of ours, as are keys and values of the encoder's output, and gate and up.
    """
    sources: Shapes = {}
    for ours, block, layer, parameter in our_parameters(config):
        module, _, kind = parameter.name.rpartition(".")
        in_encoder = block < config.encoder_num_layers
        stack = f"encoder.block.{block}" if in_encoder else f"decoder.block.{block - config.encoder_num_layers}"
        if layer.is_block and module in _MLP:
            names = [f"{stack}.layer.{1 if in_encoder else 2}.{name}.{kind}" for name in _MLP[module]]
        elif layer.is_block:
            names = [f"{stack}.layer.{name}.{kind}" for name in _ATTENTION[module]]
        elif layer.class_name == "RelativePositions":
            names = [f"{stack}.layer.0.SelfAttention.relative_attention_bias.{kind}"]
        else:
            names = [f"{_OTHERS[layer.class_name]}.{kind}"]
        shape = parameter.shape
        sources[ours] = dict.fromkeys(names, shape[1:] if len(shape) > 2 else (shape[0] // len(names), *shape[1:]))
    return sources
