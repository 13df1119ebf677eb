"""GPT models and models of the Llama family in the checkpoints of other Megatrons, as models of this suite.

n heads of a rank, d size of a head, f inside the MLP, h hidden
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.common.errors import CheckpointError
from megatron.config import ModelConfig
from megatron.model.architectures import GPT2
from megatron.model.spec import ParameterSpec
from megatron.tools.convert.megatron_config import GivenModel, config_of
from megatron.tools.convert.megatron_files import HEAD, HEAD_COPY, Shards, State, tensor_of
from megatron.tools.convert.whole_model import WholeModel, in_order


def whole_model(shards: Shards, given: GivenModel) -> WholeModel:
    """The model in fp32.

    Raises ConfigError if a property is neither in the files nor given, CheckpointError if weights are missing, have
    other shapes, or belong to another model.
    """
    config = config_of(shards, given)
    names, specs = _our_names(config), GPT2.named_parameters(config)
    words = names[HEAD_COPY] = names["word_embeddings.weight"]
    names.setdefault(HEAD, words)
    version = shards.version if given.version is None else given.version
    weights: State = {}
    for name in sorted(shards.states[0], key=(HEAD, HEAD_COPY).__contains__):
        ours = names.get(name, name)
        weight = _merged(shards, name, specs.get(ours), config, version)
        if ours in weights and not weight.equal(weights[ours]):
            raise CheckpointError(f"{shards.folder}: the output projection is not the embedding table, as it is here")
        weights[ours] = weight
    for name, spec in specs.items():
        if spec.is_vocabulary and name in weights:
            weights[name] = weights[name][: config.vocab_size]
    return WholeModel(config, in_order(weights, config, str(shards.folder)))


def _our_names(config: ModelConfig) -> dict[str, str]:
    """The names of ``megatron_files`` -> ours."""
    names: dict[str, str] = {}
    norms = dict.fromkeys(("LayerNorm", "RMSNorm"), "final_layernorm.")
    outer = {"WordEmbedding": "", "PositionEmbedding": "", "OutputLayer": HEAD.removesuffix("weight"), **norms}
    blocks = 0
    for prefix, layer in GPT2.prefixed_layers(config):
        theirs = f"layers.{blocks}." if layer.is_block else outer.get(layer.class_name)
        blocks += layer.is_block
        if theirs is not None:
            names |= {theirs + spec.name: prefix + spec.name for spec in layer.parameters}
    return names


def _merged(shards: Shards, name: str, spec: ParameterSpec | None, config: ModelConfig, version: float) -> Tensor:
    """The full weight ``name`` in fp32, from the shards of all ranks."""
    dim = None if spec is None else spec.shard_dim
    try:
        parts = [
            _rows(name, tensor_of(shards, name, rank=rank), config, version, len(shards.states))
            for rank in range(len(shards.states))
        ]
        return (parts[0] if dim is None else torch.cat(parts, dim)).float()
    except (RuntimeError, IndexError):
        message = f"{shards.folder}: {name}: the shapes of the ranks' shards do not match"
        raise CheckpointError(message) from None


_ORDERS: Mapping[float, tuple[tuple[int, ...], tuple[int, int]]] = {
    0.0: ((3, 0, -1), (0, 1)),
    1.0: ((0, -1, 3), (1, 2)),
}
"""Checkpoint version -> sizes of the rows of query_key_value, 0 for n, and the dimensions to exchange."""


def _rows(name: str, tensor: Tensor, config: ModelConfig, version: float, size: int) -> Tensor:
    """A rank's tensor with the rows of query_key_value as [n, 3, d], and those of gate and up as [2, f, ..]."""
    heads, is_grouped = config.num_attention_heads // size, config.query_groups < config.num_attention_heads
    if "query_key_value" in name and version in _ORDERS and not is_grouped and len(tensor) % (3 * heads) == 0:
        shape, dims = _ORDERS[version]
        return tensor.unflatten(0, [part or heads for part in shape]).transpose(*dims).flatten(0, 2)
    return tensor.unflatten(0, (2, -1)) if config.is_gated and "dense_h_to_4h" in name else tensor
