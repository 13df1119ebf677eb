"""What a Hugging Face folder says of its model: config.json, and names and shapes of its weights. No torch here.

GPT-2 and the models of the Llama family are converted in both directions.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError, ConfigError
from megatron.config.huggingface import gpt2, llama
from megatron.config.reading import parse_json, read_bytes
from megatron.model.architectures import GPT2

HF_CONFIG = "config.json"
MODEL_TYPES = {gpt2.MODEL_TYPE: gpt2.CLASS_NAME} | {name: family.class_name for name, family in llama.FAMILIES.items()}
"""``model_type`` to the class in ``transformers``."""
HEAD = "lm_head.weight"
_BUFFER = re.compile(r"(.*\.)?(attn\.(masked_)?bias|rotary_emb\.inv_freq)")
"""Tensors in older files that are no weights: the causal mask, and the frequencies of the rotation."""
_TOKENS = ("bos_token_id", "eos_token_id")


def read_config(folder: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The model that ``config.json`` in ``folder`` describes, with the vocabulary of its tokenizer if that is known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    return config_of(read_json(folder / HF_CONFIG), folder / HF_CONFIG, vocab_size=vocab_size)


def config_of(tree: Mapping[str, Any], path: Path, *, vocab_size: int | None = None) -> ModelConfig:
    """The same of the content of the file."""
    kind = tree.get("model_type", gpt2.MODEL_TYPE)
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        names = ", ".join(MODEL_TYPES)
        raise CheckpointError(f"{path}: model_type is {kind!r}, which is not supported; supported are {names}")
    read = gpt2.read_config if kind == gpt2.MODEL_TYPE else llama.read_config
    return read(tree, path, vocab_size=vocab_size)


def is_llama(config: ModelConfig) -> bool:
    """Whether the format of ``config`` is that of the Llama family, instead of GPT-2's."""
    return config.has_rotary_embedding or config.swiglu or config.normalization == "RMSNorm"


def write_config(config: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of ``config`` with weights of ``dtype`` (such as float32).

    It is ``source``, the one that the model was read from, if the model is still as it says. Raises ConfigError with a
    line for each setting that Hugging Face's model does not have.
    """
    if config.architecture != GPT2.name:
        raise ConfigError(f"the model is {config.architecture}, and to-hf supports {GPT2.name} only; use merge")
    write = llama.write_config if is_llama(config) else gpt2.write_config
    tree = write(config, dtype)
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


def source_shapes(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Our name of each weight, in the order of the layers, to name and shape of the tensors that it consists of."""
    return (llama if is_llama(config) else gpt2).source_shapes(config)


def shape_problems(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: str) -> list[str]:
    """A message for each weight of ``config`` that is missing in ``shapes`` or has another one; for unknown ones, too.

    A head is accepted where the embedding is the head, too.
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
        if name not in expected and name != HEAD and not _BUFFER.fullmatch(name)
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
