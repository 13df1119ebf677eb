"""What the formats share: values of config.json, with a message for each that cannot be taken over, and our weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.config.model import ModelConfig
from megatron.model.architectures import architecture_of
from megatron.model.spec import LayerSpec, ParameterSpec

Shapes = dict[str, dict[str, tuple[int, ...]]]
"""Our name of each weight to name and shape of the tensors that it consists of."""
GELU_KINDS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
"""Hugging Face's activations, and whether each is OpenAI's tanh approximation. The first name of each is written."""
Names = Mapping[str, tuple[str, Any]]
"""Field of ModelConfig to the name of the same value in config.json, and its default there."""


def read_values(
    tree: Mapping[str, Any], sizes: Names, numbers: Names, fixed: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The fields of ModelConfig in ``sizes`` and ``numbers``, and a message for each value that is wrong.

    ``fixed`` are settings that have other values there, but not here.
    """
    values = {field: tree.get(name, default) for field, (name, default) in {**sizes, **numbers}.items()}
    problems = [
        f"{name} is {tree[name]!r}, and only {value!r} can be taken over"
        for name, value in fixed.items()
        if name in tree and tree[name] != value
    ]
    problems += [
        f"{name} is {values[field]!r}, and should be a whole number above 0"
        for field, (name, _) in sizes.items()
        if type(values[field]) is not int or values[field] < 1
    ]
    problems += [
        f"{name} is {values[field]!r}, and should be a number"
        for field, (name, _) in numbers.items()
        if type(values[field]) not in (int, float)
    ]
    return values, problems


def vocabulary_problems(rows: int, tokens: int | None) -> list[str]:
    """A message if the tokenizer has more ``tokens`` than the table has ``rows``."""
    return [f"vocab_size is {rows}, and its tokenizer has {tokens} tokens"] if (tokens or 0) > rows else []


def gelu_name(config: ModelConfig) -> str:
    """Hugging Face's name of the activation."""
    return next(name for name, is_tanh in GELU_KINDS.items() if is_tanh == config.openai_gelu)


def gelu_problems(name: str, kind: Any) -> list[str]:
    """A message if the setting ``name`` has a ``kind`` of activation that is no GELU."""
    return [] if str(kind) in GELU_KINDS else [f"{name} is {kind!r}, and can be {' or '.join(GELU_KINDS)}"]


def our_parameters(config: ModelConfig) -> Iterator[tuple[str, int, LayerSpec, ParameterSpec]]:
    """Name, number of transformer layers before it, layer and spec of each weight, in the order of the layers."""
    block = 0
    for prefix, layer in architecture_of(config).prefixed_layers(config):
        for parameter in layer.parameters:
            yield prefix + parameter.name, block, layer, parameter
        block += layer.is_block
