"""What a Hugging Face folder says of its model: config.json, and names and shapes of its weights. No torch here.

GPT-2, the models of the Llama family, BERT and T5 1.1, each a module here, are converted in both directions.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.common.reading import parse_json, read_bytes
from megatron.config import ModelConfig
from megatron.config.positions import ROTATION
from megatron.model.architectures import GPT2, T5
from megatron.model.huggingface import bert, gpt2, llama, t5
from megatron.model.huggingface.values import Shapes

HF_CONFIG = "config.json"
FORMATS: dict[str, ModuleType] = {
    gpt2.MODEL_TYPE: gpt2,
    **dict.fromkeys(llama.FAMILIES, llama),
    bert.MODEL_TYPE: bert,
    t5.MODEL_TYPE: t5,
}
"""``model_type`` to the module that reads and writes it."""
_BUFFER = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq|embeddings\.position_ids)")
"""Tensors in older files that are no weights: the causal mask, the frequencies of the rotation, the positions."""
_TOKENS = ("bos_token_id", "eos_token_id")


def read_config(folder: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that ``config.json`` in ``folder`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    return config_of(read_json(folder / HF_CONFIG), folder / HF_CONFIG, vocab_size=vocab_size)


def config_of(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The same of the content of the file."""
    kind = tree.get("model_type", gpt2.MODEL_TYPE)
    if not isinstance(kind, str) or kind not in FORMATS:
        names = ", ".join(FORMATS)
        raise CheckpointError(f"{path}: model_type is {kind!r}, which is not supported; supported are {names}")
    config: ModelConfig = FORMATS[kind].read_config(tree, path, vocab_size=vocab_size)
    return config


def format_of(config: ModelConfig) -> ModuleType:
    """The module of the format that the model has: ``gpt2``, ``llama``, ``bert`` or ``t5``.

    Raises ConfigError if the architecture is none of these.
    """
    if config.architecture in bert.CLASS_NAMES:
        return bert
    if config.architecture == T5.name:
        return t5
    if config.architecture != GPT2.name:
        names = ", ".join((GPT2.name, *bert.CLASS_NAMES, T5.name))
        raise ConfigError(f"the model is {config.architecture}, and to-hf supports {names}; use merge")
    is_llama = config.has_rotary_embedding or config.swiglu or config.normalization == "RMSNorm"
    return llama if is_llama else gpt2


_SHAPE = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "query_groups",
    "kv_channels": "head_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "swiglu": "swiglu",
    "normalization": "normalization",
    "qk_layernorm": "qk_layernorm",
    "disable_bias_linear": "disable_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "untie_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "position_embedding_type": "position_embedding_type",
    "num_experts": "num_experts",
    "moe_ffn_hidden_size": "expert_size",
    "moe_layer_freq": "moe_layer_freq",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
}
"""Flags of the shape of a model to the properties that have their values."""
_OTHER_FLAGS = (
    *(name for name in ROTATION if name != "rotary_percent"),
    "max_position_embeddings",
    "layernorm_epsilon",
    "openai_gelu",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "pre_tokens",
    "moe_router_topk",
    "moe_router_pre_softmax",
)


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The values of the flags that decide which weights the model has, and their shapes."""
    shape = {name: getattr(config, of_model) for name, of_model in _SHAPE.items()}
    if format_of(config) is t5:
        shape |= {name: getattr(config, name) for name in t5.SHAPE} | {"num_layers": config.encoder_num_layers}
    return shape | ({"max_position_embeddings": config.position_rows} if config.has_position_table else {})


def model_words(config: ModelConfig) -> list[str]:
    """The command-line arguments that stand for the model, where they differ from the defaults of the flags."""
    values = shape_of(config) | {name: getattr(config, name) for name in _OTHER_FLAGS}
    if config.query_groups == config.num_attention_heads:
        del values["num_query_groups"]
    if format_of(config) is t5:
        del values["max_position_embeddings"]
    words: list[str] = []
    for name, value in values.items():
        if value != getattr(ModelConfig(), name):
            flag = name.replace("_", "-")
            words.append(f"--no-{flag}" if value is False else f"--{flag}")
            words += [] if isinstance(value, bool) else [str(value)]
    # Tables of the Llama family and T5 have more rows than their tokenizers have tokens; those of others are cut.
    return [*words, "--vocab-size", str(config.vocab_size)] if format_of(config) in (llama, t5) else words


def write_config(config: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32).

    It is ``source``, the one that the model was read from, if the model is still as it says. Raises ConfigError with a
    line for each setting that Hugging Face's model does not have.
    """
    write = format_of(config).write_config
    tree: dict[str, Any] = write(config, dtype)
    if source is None:
        return tree
    try:
        before = write(config_of(source, Path(HF_CONFIG)), dtype)
    except (CheckpointError, ConfigError):
        return tree
    if any(tree[name] != before.get(name) for name in tree if name not in _TOKENS):
        return tree
    name = "torch_dtype" if "torch_dtype" in source else "dtype"
    return {**source, name: dtype}


def source_shapes(config: ModelConfig) -> Shapes:
    """Our name of each weight, in the order of the layers, to name and shape of the tensors that it consists of."""
    shapes: Shapes = format_of(config).source_shapes(config)
    return shapes


def shape_problems(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> list[str]:
    """A message for each weight of ``config`` that is missing in ``shapes`` or has another one; for unknown ones, too.

    Names that repeat a weight, such as that of a head that is the embedding, are accepted.
    """
    names = {name.removeprefix(gpt2.PREFIX): shape for name, shape in shapes.items()}
    expected = {
        name.removeprefix(gpt2.PREFIX): shape
        for sources in source_shapes(config).values()
        for name, shape in sources.items()
    }
    problems = [f"{source} holds no weight {name}" for name in expected if name not in names]
    problems += [
        f"{source} holds {name}, which the model does not have"
        for name in names
        if name not in expected and name not in format_of(config).TIED and not _BUFFER.fullmatch(name)
    ]
    return problems + [
        f"{source}: {name} is {list(names[name])}, and the model's {list(shape)}"
        for name, shape in expected.items()
        if name in names and names[name] != shape
    ]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if there is none."""
    try:
        tree = parse_json(read_bytes(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # of JSON, of UTF-8, and of too many nested brackets
        raise CheckpointError(f"{path} is not JSON ({error}); is the file complete?") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is a JSON {type(tree).__name__}, and should be an object")
    return tree
