"""Reads and writes Hugging Face model descriptions: config.json, and names and shapes of weights. No torch here.

GPT-2, the models of the Llama family, BERT, T5 1.1 and LLaVA are converted in both directions.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError
from megatron.common.reading import LARGEST_JSON, LARGEST_SETTINGS, is_present, parse_json, read_bytes
from megatron.config import ModelConfig
from megatron.config.positions import ROTATION
from megatron.model.architectures import GPT2, LLAVA, T5
from megatron.model.huggingface.bert_and_t5 import BERT_CLASSES, BERT_FORMAT, T5_FORMAT, T5_SHAPE
from megatron.model.huggingface.formats import Format, Shapes, canonical, config_from, shapes_of
from megatron.model.huggingface.gpt2 import GPT2_FORMAT
from megatron.model.huggingface.llama import LLAMA_FORMATS, family_of
from megatron.model.huggingface.llava import LLAVA_FORMAT, OTHER_FLAGS, PROCESSORS, SHAPE, read_image_fit

HF_CONFIG = "config.json"
FORMATS: dict[str, Format] = {
    "gpt2": GPT2_FORMAT,
    **LLAMA_FORMATS,
    "megatron-bert": BERT_FORMAT,
    "t5": T5_FORMAT,
    "llava": LLAVA_FORMAT,
}
"""``model_type`` in config.json to its format."""
_BUFFER = re.compile(
    r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq|embeddings\.position_ids)"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
"""Names of tensors in older files that no model uses: causal mask, RoPE frequencies, position ids, a bias of T5."""


def read_config(folder: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model described by ``config.json`` in ``folder``; ``vocab_size`` is the tokenizer's, if known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    config = config_of(read_json(folder / HF_CONFIG, LARGEST_SETTINGS), folder / HF_CONFIG, vocab_size=vocab_size)
    return replace(config, image_fit=_image_fit(folder, config)) if config.architecture == LLAVA.name else config


def _image_fit(folder: Path, config: ModelConfig) -> str:
    for file in (folder / name for name in PROCESSORS if is_present(folder / name)):
        tree = read_json(file, LARGEST_SETTINGS)
        if "image_processor" in tree or file.name == PROCESSORS[0]:
            return read_image_fit(tree.get("image_processor", tree), config, file)
    return config.image_fit


def config_of(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model described by ``tree``, the content of the config.json at ``path``; see ``read_config``."""
    kind = tree.get("model_type", "gpt2")
    if not isinstance(kind, str) or kind not in FORMATS:
        names = ", ".join(FORMATS)
        raise CheckpointError(f"{path}: model_type is {kind!r}, which is not supported; supported are {names}")
    return config_from(FORMATS[kind], tree, path, vocab_size)


def format_of(config: ModelConfig) -> Format:
    """The Hugging Face format of the model; "llama" for the entire Llama family.

    Raises ConfigError if there is none for the architecture.
    """
    if config.architecture in BERT_CLASSES:
        return BERT_FORMAT
    if config.architecture == T5.name:
        return T5_FORMAT
    if config.architecture == LLAVA.name:
        return LLAVA_FORMAT
    if config.architecture != GPT2.name:
        names = ", ".join((GPT2.name, *BERT_CLASSES, T5.name, LLAVA.name))
        raise ConfigError(f"the model is {config.architecture}, and to-hf supports {names}; use merge")
    is_llama = config.has_rotary_embedding or config.swiglu or config.normalization == "RMSNorm"
    return FORMATS["llama"] if is_llama else GPT2_FORMAT


def model_title(config: ModelConfig) -> str:
    """The family name of the model, such as Llama or Mixtral, or else the name of its architecture."""
    if config.architecture != GPT2.name or not (config.has_rotary_embedding or config.swiglu):
        return config.architecture
    try:
        return family_of(config).class_name.removesuffix("ForCausalLM")
    except ConfigError:  # no family has all its settings
        return "GPT" if not config.swiglu else "Llama with experts" if config.has_experts else "Llama"


RESOLVED = {"num_query_groups": "query_groups", "kv_channels": "head_size", "moe_ffn_hidden_size": "expert_size"}
"""Flags to the property with their resolved value: the flag itself may be unset."""
_SHAPE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("swiglu", "normalization", "qk_layernorm", "disable_bias_linear", "add_qkv_bias"),
    *("untie_embeddings_and_output_weights", "position_embedding_type"),
    *("num_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
)
"""Flags that determine which weights a model has, and their shapes."""
_OTHER_FLAGS = (
    *(name for name in ROTATION if name != "rotary_percent"),
    *("max_position_embeddings", "layernorm_epsilon", "openai_gelu", "attention_dropout", "hidden_dropout"),
    *("init_method_std", "pre_tokens", "moe_router_topk", "moe_router_pre_softmax"),
    *OTHER_FLAGS,
)


def shape_of(config: ModelConfig) -> dict[str, Any]:
    """The values of the flags that determine which weights the model has, and their shapes."""
    shape = {name: getattr(config, RESOLVED.get(name, name)) for name in _SHAPE}
    if format_of(config) is T5_FORMAT:
        shape |= {name: getattr(config, name) for name in T5_SHAPE} | {"num_layers": config.encoder_num_layers}
    if format_of(config) is LLAVA_FORMAT:
        shape |= {name: getattr(config, name) for name in SHAPE} | {"num_layers": config.language_model.num_layers}
    return shape | ({"max_position_embeddings": config.position_rows} if config.has_position_table else {})


def model_arguments(config: ModelConfig) -> list[str]:
    """The command-line arguments that select the model, without flags that have their default."""
    values = shape_of(config) | {name: getattr(config, name) for name in _OTHER_FLAGS}
    if config.query_groups == config.num_attention_heads:
        del values["num_query_groups"]
    if format_of(config) is T5_FORMAT:
        del values["max_position_embeddings"]
    arguments: list[str] = []
    for name, value in values.items():
        if value != getattr(ModelConfig(), name) or (name == "pre_tokens" and config.has_window):
            flag = name.replace("_", "-")
            arguments.append(f"--no-{flag}" if value is False else f"--{flag}")
            arguments += [] if isinstance(value, bool) else [str(value)]
    return [*arguments, "--vocab-size", str(config.vocab_size)] if format_of(config).keeps_rows else arguments


def source_shapes(config: ModelConfig) -> Shapes:
    """Name of each weight here to name and shape of its tensors in Hugging Face files, in the order of the layers."""
    return shapes_of(format_of(config), config)


def shape_problems(
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
    files: Mapping[str, Path] = MappingProxyType({}),
) -> list[str]:
    """A message for each weight of ``config`` that is missing or misshaped in ``shapes``, and for each unknown name.

    It names the file of the tensor if that is in ``files``, else ``source``. Duplicates of a tied weight are accepted,
    such as the output projection next to the embedding.
    """
    names = {canonical(name): shape for name, shape in shapes.items()}
    given = {canonical(name): name for name in shapes}
    expected = {canonical(name): shape for sources in source_shapes(config).values() for name, shape in sources.items()}
    problems = [f"{source} holds no weight {name}" for name in expected if name not in names]
    problems += [
        f"{source} holds {given[canonical(name)]} and {name}, which are one weight"
        for name in shapes
        if given[canonical(name)] != name
    ]
    problems += [
        f"{files.get(given[name], source)} holds {given[name]}, which the model does not have"
        for name in names
        if name not in expected and name not in format_of(config).tied and not _BUFFER.fullmatch(name)
    ]
    return problems + [
        f"{files.get(given[name], source)}: {name} is {list(names[name])}, and the model's {list(shape)}"
        for name, shape in expected.items()
        if name in names and names[name] != shape
    ]


def read_json(path: Path, largest: int = LARGEST_JSON) -> dict[str, Any]:
    """Read the object in a JSON file. Raises CheckpointError if it cannot be read or is not an object."""
    try:
        tree = parse_json(read_bytes(path, largest=largest))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # invalid JSON or UTF-8, or nested too deep
        raise CheckpointError(f"{path} is not JSON ({error}); is the file complete?") from None
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} is a JSON {type(tree).__name__}, and should be an object")
    return tree
