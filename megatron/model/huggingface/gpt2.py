"""GPT-2 in Hugging Face's format: config.json to and from a ModelConfig, names and shapes of weights. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.huggingface.values import (
    GELU_KINDS,
    Shapes,
    gelu_name,
    gelu_problems,
    our_parameters,
    read_values,
    vocabulary_problems,
)

MODEL_TYPE, CLASS_NAME = "gpt2", "GPT2LMHeadModel"
PREFIX = "transformer."
"""Which names have in files of the whole model, and not in those of the model without a head."""
TIED = {"lm_head.weight": "transformer.wte.weight"}
"""Names that files may have besides, to the weights that they repeat."""

_SIZES = {
    "num_layers": ("n_layer", 12),
    "hidden_size": ("n_embd", 768),
    "num_attention_heads": ("n_head", 12),
    "max_position_embeddings": ("n_positions", 1024),
    "vocab_size": ("vocab_size", 50257),
}
_INNER_SIZE = {"ffn_hidden_size": ("n_inner", None)}
"""Is 4 n_embd, unless config.json has it."""
_NUMBERS = {
    "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
    "hidden_dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "init_method_std": ("initializer_range", 0.02),
}
_FIXED = {
    "model_type": MODEL_TYPE,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Settings that have other values there, but not here."""


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32).

    Raises ConfigError with a line for each setting that Hugging Face's GPT-2 does not have.
    """
    required = {
        "biases in all linear layers": config.linear_bias,
        "an output projection that is the embedding": not config.untie_embeddings_and_output_weights,
        "a table of positions": config.has_position_table,
        "heads of hidden size / heads": config.head_size * config.num_attention_heads == config.hidden_size,
        "keys and values for each head": config.query_groups == config.num_attention_heads,
        "heads that are not normalized": not config.qk_layernorm,
    }
    problems = [f"others than {name}" for name, on in required.items() if not on]
    if config.apply_residual_connection_post_layernorm:
        problems.append("--apply-residual-connection-post-layernorm, so its residual is taken after the norm")
    if config.pre_tokens < config.max_position_embeddings - 1:
        problems.append(
            f"--pre-tokens {config.pre_tokens}, so its attention sees less than its "
            f"{config.max_position_embeddings} positions"
        )
    if problems:
        raise ConfigError(
            f"the model was trained with {problem}; Hugging Face's GPT-2 does not support that; use merge"
            for problem in problems
        )
    return {
        "architectures": [CLASS_NAME],
        **_FIXED,
        **{name: getattr(config, field) for field, (name, _) in {**_SIZES, **_INNER_SIZE, **_NUMBERS}.items()},
        "bos_token_id": config.eod_token,
        "eos_token_id": config.eod_token,
        "activation_function": gelu_name(config),
        "embd_pdrop": config.hidden_dropout,
        "torch_dtype": dtype,
    }


def read_config(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that the config.json at ``path`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    sizes = _SIZES if tree.get("n_inner") is None else {**_SIZES, **_INNER_SIZE}
    values, problems = read_values(tree, sizes, _NUMBERS, _FIXED)
    activation = tree.get("activation_function", "gelu_new")
    problems += gelu_problems("activation_function", activation)
    if not problems and values["hidden_size"] % values["num_attention_heads"]:
        problems.append(f"n_embd {values['hidden_size']} is not a multiple of n_head {values['num_attention_heads']}")
    problems = problems or vocabulary_problems(values["vocab_size"], vocab_size)
    if problems:
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    tokens, eod = vocab_size or values["vocab_size"], tree.get("eos_token_id")
    return ModelConfig(
        **{"ffn_hidden_size": 4 * values["hidden_size"], **values, "vocab_size": tokens},
        padded_vocab_size=tokens,
        openai_gelu=GELU_KINDS[activation],
        eod_token=eod if type(eod) is int else tokens - 1,
    )


_LAYER = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
_OTHERS = {"WordEmbedding": "wte", "PositionEmbedding": "wpe", "LayerNorm": "ln_f"}
"""Class of a layer outside the blocks to the name of its module."""


def source_shapes(config: ModelConfig) -> Shapes:
    """Our name of each weight, in the order of the layers, to name and shape of the tensor that it consists of.

    Their linear layers are Conv1D: y = x W + b, where ours is y = x W^T + b.
    """
    sources: Shapes = {}
    for ours, block, layer, parameter in our_parameters(config):
        module, _, kind = parameter.name.rpartition(".")
        theirs = f"h.{block}.{_LAYER[module]}" if layer.is_block else _OTHERS[layer.class_name]
        shape = tuple(reversed(parameter.shape)) if layer.is_block else parameter.shape
        sources[ours] = {f"{PREFIX}{theirs}.{kind}": shape}
    return sources
