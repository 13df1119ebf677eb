"""Converts our weights to Hugging Face's names and shapes, one weight at a time.

n heads, g query groups, d size of a head
"""

from collections.abc import Mapping

from torch import Tensor

from megatron.checkpoint.tensor_files import LazyTensors, outlines_of
from megatron.config import ModelConfig
from megatron.model.huggingface import GPT2_FORMAT, format_of, source_shapes
from megatron.model.spec import sizes_of


def their_weights(weights: Mapping[str, Tensor], config: ModelConfig) -> LazyTensors:
    """The state dict of Hugging Face's model from our ``weights``; a tied head is left out."""
    outlines, sources = outlines_of(weights), source_shapes(config)
    places = {theirs: (ours, index) for ours, names in sources.items() for index, theirs in enumerate(names)}

    def read(theirs: str) -> Tensor:
        ours, index = places[theirs]
        return divided(ours, weights[ours], config)[index]

    shapes = {theirs: shape for names in sources.values() for theirs, shape in names.items()}
    return LazyTensors(
        {name: outlines[places[name][0]].new_empty(shape, device="meta") for name, shape in shapes.items()}, read
    )


def divided(name: str, ours: Tensor, config: ModelConfig) -> list[Tensor]:
    """Hugging Face's tensors for our weight ``name``."""
    config = sizes_of(config, name)
    if format_of(config) is GPT2_FORMAT:
        return [_to_gpt2(name, ours, config)]
    if "key_value" in name:
        groups = ours.unflatten(0, (config.query_groups, -1, config.head_size))
        sizes = [groups.size(1) - 2, 1, 1] if "query" in name else [1, 1]
        return [part.flatten(0, 2).contiguous() for part in groups.split(sizes, dim=1)]
    if "mlp.experts" in name:
        return list(ours.flatten(0, -3).unbind())
    return list(ours.unbind()) if config.is_gated and "dense_h_to_4h" in name else [ours]


def _to_gpt2(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    if "query_key_value" in name:  # [n, 3, d, ..] -> [3, n, d, ..]
        tensor = tensor.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return (tensor.t() if tensor.dim() == 2 and "embeddings" not in name else tensor).contiguous()
