"""The weights of GPT2Model by name, without the model: no processes, no memory.

v vocabulary, p positions, h hidden, f inside the MLP
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config import ModelConfig

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
    """What ``GPT2Model(config)`` is made of at tensor-parallel size 1."""
    h, layers = config.hidden_size, range(config.num_layers)
    weights = {WORDS: _meta(config.padded_vocab_size, h, cut=0), POSITIONS: _meta(config.max_position_embeddings, h)}
    for layer in layers:
        weights |= {layer_prefix(layer) + name: tensor for name, tensor in _layer(h, config.ffn_hidden_size).items()}
    return Outline(weights | {norm_prefix(config.num_layers) + name: _meta(h) for name in ("weight", "bias")})


def layer_prefix(layer: int) -> str:
    """What the names of a transformer layer begin with, the first layer being 0."""
    return f"{layer + 2}."


def norm_prefix(num_layers: int) -> str:
    """What the names of the last layer norm begin with."""
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
