"""GPT-2 in Hugging Face's format: config.json to and from a ModelConfig, names and shapes of weights. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError, ConfigError
from megatron.model.architectures import GPT2

MODEL_TYPE, CLASS_NAME = "gpt2", "GPT2LMHeadModel"
GELU_KINDS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
"""Hugging Face's activations, and whether each is OpenAI's tanh approximation. The first name of each is written."""

_DEFAULTS = {
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "initializer_range": 0.02,
}
"""Hugging Face's defaults for what config.json lacks."""

_FIXED = {
    "model_type": MODEL_TYPE,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Settings that have other values there, but not here."""

_SIZES = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size", "n_inner")


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
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_head": config.num_attention_heads,
        "n_positions": config.max_position_embeddings,
        "n_inner": config.ffn_hidden_size,
        "vocab_size": config.vocab_size,
        "bos_token_id": config.eod_token,
        "eos_token_id": config.eod_token,
        "activation_function": next(name for name, tanh in GELU_KINDS.items() if tanh == config.openai_gelu),
        "layer_norm_epsilon": config.layernorm_epsilon,
        "resid_pdrop": config.hidden_dropout,
        "embd_pdrop": config.hidden_dropout,
        "attn_pdrop": config.attention_dropout,
        "initializer_range": config.init_method_std,
        "torch_dtype": dtype,
    }


def read_config(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that the config.json at ``path`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    values = {name: tree.get(name, default) for name, default in _DEFAULTS.items()}
    problems = [
        f"{path}: {name} is {tree[name]!r}, and only {value!r} can be taken over"
        for name, value in _FIXED.items()
        if name in tree and tree[name] != value
    ]
    problems += [
        f"{path}: {name} is {values[name]!r}, and should be a whole number above 0"
        for name in _SIZES
        if not (type(values[name]) is int and values[name] > 0 or name == "n_inner" and values[name] is None)
    ]
    problems += [
        f"{path}: {name} is {values[name]!r}, and should be a number"
        for name in ("layer_norm_epsilon", "resid_pdrop", "attn_pdrop", "initializer_range")
        if type(values[name]) not in (int, float)
    ]
    if str(values["activation_function"]) not in GELU_KINDS:
        problems.append(
            f"{path}: activation_function is {values['activation_function']!r}, and can be {' or '.join(GELU_KINDS)}"
        )
    if not problems and values["n_embd"] % values["n_head"]:
        problems.append(f"{path}: n_embd {values['n_embd']} is not a multiple of n_head {values['n_head']}")
    if not problems and vocab_size is not None and vocab_size > values["vocab_size"]:
        problems.append(f"{path}: vocab_size is {values['vocab_size']}, and its tokenizer has {vocab_size} tokens")
    if problems:
        raise CheckpointError(problems)
    tokens = vocab_size or values["vocab_size"]
    eod = tree.get("eos_token_id")
    return ModelConfig(
        num_layers=values["n_layer"],
        hidden_size=values["n_embd"],
        num_attention_heads=values["n_head"],
        max_position_embeddings=values["n_positions"],
        ffn_hidden_size=values["n_inner"] or 4 * values["n_embd"],
        openai_gelu=GELU_KINDS[values["activation_function"]],
        layernorm_epsilon=values["layer_norm_epsilon"],
        hidden_dropout=values["resid_pdrop"],
        attention_dropout=values["attn_pdrop"],
        init_method_std=values["initializer_range"],
        vocab_size=tokens,
        padded_vocab_size=tokens,
        eod_token=eod if type(eod) is int else tokens - 1,
    )


PREFIX = "transformer."
"""Which names have in files of the whole model, and not in those of the model without a head."""
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


def source_shapes(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Our name of each weight, in the order of the layers, to name and shape of the tensor that it consists of.

    Their linear layers are Conv1D: y = x W + b, where ours is y = x W^T + b.
    """
    sources: dict[str, dict[str, tuple[int, ...]]] = {}
    block = 0
    for prefix, layer in GPT2.prefixed_layers(config):
        for parameter in layer.parameters:
            module, _, kind = parameter.name.rpartition(".")
            theirs = f"h.{block}.{_LAYER[module]}" if layer.is_block else _OTHERS[layer.class_name]
            shape = tuple(reversed(parameter.shape)) if layer.is_block else parameter.shape
            sources[prefix + parameter.name] = {f"{PREFIX}{theirs}.{kind}": shape}
        block += layer.is_block
    return sources
