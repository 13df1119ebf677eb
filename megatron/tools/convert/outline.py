"""The weights of a whole model by name, without the model: no processes, no memory.

v vocabulary, p positions, h hidden, f inside the MLP
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.model.architectures import BERT, GPT2

WORDS = "tied_modules.embed.word_embeddings.weight"
"""The table of the tokens, at both ends of the model."""
POSITIONS = "1.position_embeddings.weight"


@dataclass(frozen=True)
class Outline:
    """What can be asked of a module without weights: their names, shapes, and how tensor parallelism cuts them."""

    weights: dict[str, Tensor]
    """On the meta device; ``partition_dim`` is an attribute of those that are cut."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors without values, in the order of the layers."""
        return iter(self.weights.items())


def outline(config: ModelConfig) -> Outline:
    """What the model of ``config`` is made of at tensor-parallel size 1."""
    return Outline(OUTLINES[config.architecture](config))


def _gpt2(config: ModelConfig) -> dict[str, Tensor]:
    h = config.hidden_size
    front = {WORDS: _meta(config.padded_vocab_size, h, cut=0), POSITIONS: _meta(config.max_position_embeddings, h)}
    return front | _layers(config, first=2)


def _bert(config: ModelConfig) -> dict[str, Tensor]:
    h, head = config.hidden_size, config.num_layers + 5
    weights = {
        WORDS: _meta(config.padded_vocab_size, h, cut=0),
        "1.tokentype_embeddings.weight": _meta(2, h),
        "2.position_embeddings.weight": _meta(config.max_position_embeddings, h),
        **_layers(config, first=3),
    }
    for part, outputs in (("dense", h), ("layernorm", None), ("pooler", h), ("order", 2)):
        weights[f"{head}.{part}.weight"] = _meta(h) if outputs is None else _meta(outputs, h)
        weights[f"{head}.{part}.bias"] = _meta(outputs or h)
    return weights | {f"{head + 2}.word_bias": _meta(config.padded_vocab_size, cut=0)}


OUTLINES: dict[str, Callable[[ModelConfig], dict[str, Tensor]]] = {GPT2.name: _gpt2, BERT.name: _bert}
"""The weights of each model, in the order of its layers."""


def _layers(config: ModelConfig, *, first: int) -> dict[str, Tensor]:
    """The transformer layers from number ``first`` on, and the last norm."""
    h, last = config.hidden_size, first + config.num_layers
    layers = [_layer(h, config.ffn_hidden_size) for _ in range(config.num_layers)]
    weights = {f"{n}.{name}": tensor for n, layer in enumerate(layers, first) for name, tensor in layer.items()}
    return weights | {f"{last + 1}.{name}": _meta(h) for name in ("weight", "bias")}


def layer_prefix(layer: int) -> str:
    """What the names of a transformer layer of GPT-2 begin with, the first layer being 0."""
    return f"{layer + 2}."


def norm_prefix(num_layers: int) -> str:
    """What the names of GPT-2's last layer norm begin with."""
    return f"{num_layers + 3}."


def _layer(h: int, f: int) -> dict[str, Tensor]:
    return {
        "input_layernorm.weight": _meta(h),
        "input_layernorm.bias": _meta(h),
        "attention.query_key_value.weight": _meta(3 * h, h, cut=0),
        "attention.query_key_value.bias": _meta(3 * h, cut=0),
        "attention.dense.weight": _meta(h, h, cut=1),
        "attention.dense.bias": _meta(h),
        "post_attention_layernorm.weight": _meta(h),
        "post_attention_layernorm.bias": _meta(h),
        "mlp.dense_h_to_4h.weight": _meta(f, h, cut=0),
        "mlp.dense_h_to_4h.bias": _meta(f, cut=0),
        "mlp.dense_4h_to_h.weight": _meta(h, f, cut=1),
        "mlp.dense_4h_to_h.bias": _meta(h),
    }


def _meta(*shape: int, cut: int | None = None) -> Tensor:
    tensor = torch.empty(shape, device="meta")
    if cut is not None:
        tensor.partition_dim = cut
    return tensor
