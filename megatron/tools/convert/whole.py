"""A model in one piece, under the names of GPT2Model at tensor-parallel size 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError
from megatron.model.architectures import GPT2, architecture_of


@dataclass(frozen=True)
class WholeModel:
    """All weights of a model, its vocabulary not padded, and what it was built from."""

    config: ModelConfig
    """With ``padded_vocab_size`` equal to ``vocab_size``."""
    weights: Mapping[str, Tensor]
    """In the order of the layers."""
    description: Mapping[str, Any] | None = None
    """``run.json`` of the training it comes from, if it comes from one of this suite."""


class GPT2Names(NamedTuple):
    """What the names of GPT-2's parameters begin with, from its spec."""

    words: str
    """The table of tokens, in full."""
    positions: str
    """The table of positions, in full."""
    blocks: list[str]
    """The prefix of each transformer layer."""
    norm: str
    """The prefix of the final layer norm."""


def gpt2_names(config: ModelConfig) -> GPT2Names:
    """The names in a model of ``config``, a GPT-2."""
    prefixes: dict[str, list[str]] = {}
    for prefix, layer in GPT2.prefixed_layers(config):
        prefixes.setdefault(layer.class_name, []).append(prefix)
    (words,), (positions,) = prefixes["WordEmbedding"], prefixes["PositionEmbedding"]
    return GPT2Names(
        f"{words}word_embeddings.weight",
        f"{positions}position_embeddings.weight",
        prefixes["ParallelTransformerLayer"],
        prefixes["LayerNorm"][0],
    )


_LARGEST = 1 << 24
"""What no size of a model comes near, and what sizes can be multiplied with."""


def check_sizes(config: ModelConfig, count: int, place: str) -> None:
    """Raises CheckpointError where ``config`` cannot be that of ``count`` tensors: before anything is made so large."""
    sizes = (
        config.num_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.ffn_hidden_size,
        config.max_position_embeddings,
        config.vocab_size,
    )
    if config.num_layers > count or not all(type(size) is int and 0 < size <= _LARGEST for size in sizes):
        raise CheckpointError(f"{place} holds {count} tensors, which cannot be the model of {sizes} that it describes")


def in_order(weights: Mapping[str, Tensor], config: ModelConfig, place: str) -> dict[str, Tensor]:
    """``weights`` in the order of the layers of ``config``.

    Raises CheckpointError with a line for each that is missing, superfluous or has another shape; of many
    the first ones. ``place`` is where they come from.
    """
    expected = architecture_of(config).named_parameters(config)
    problems = [f"{place} holds no weight {name}" for name in expected if name not in weights]
    problems += [f"{place} holds {name}, which the model has not" for name in weights if name not in expected]
    problems += [
        f"{place}: {name} is {list(weights[name].shape)}, and the model's {list(spec.shape)}"
        for name, spec in expected.items()
        if name in weights and weights[name].shape != spec.shape
    ]
    if problems:
        raise CheckpointError(
            problems[:_SHOWN] + [f"{place}: {len(problems)} such lines in all"] * (len(problems) > _SHOWN)
        )
    return {name: weights[name] for name in expected}


_SHOWN = 4
