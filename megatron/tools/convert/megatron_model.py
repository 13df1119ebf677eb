"""One model out of what the ranks of another Megatron saved.

t tensor-parallel size, n heads of a rank, d size of a head
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import ModelConfig
from megatron.model.architectures import GPT2
from megatron.tools.convert.megatron_files import HEAD, Shards, State
from megatron.tools.convert.whole_model import WholeModel, gpt2_names, in_order

_OTHER_MODELS = ("swiglu", "geglu", "squared_relu")
"""Arguments that make another model of tensors with the same names."""
_SAME = ("apply_residual_connection_post_layernorm", "attention_dropout", "hidden_dropout", "init_method_std")
"""Arguments that mean here what they mean there."""


@dataclass(frozen=True)
class GivenModel:
    """Properties of the model given by the user; None means those in the files."""

    heads: int | None = None
    vocab_size: int | None = None
    eod_token: int | None = None
    version: float | None = None
    openai_gelu: bool = False
    layernorm_epsilon: float | None = None

    def version_of(self, shards: Shards) -> float:
        """The checkpoint version, which decides the order of query_key_value."""
        return shards.version if self.version is None else self.version


def whole_model(shards: Shards, given: GivenModel) -> WholeModel:
    """The model in fp32.

    Raises ConfigError if a property is neither in the files nor given, CheckpointError if weights are missing, have
    other shapes, or belong to another model than GPT-2.
    """
    args = {name: value for name, value in vars(shards.args).items() if isinstance(value, int | float)}
    if wrong := [name for name in _OTHER_MODELS if args.get(name)]:
        raise CheckpointError(f"{shards.folder} was trained with {wrong[0]}, so it is not a GPT-2")
    config = _config(shards, args, given)
    names = _names(config)
    words = gpt2_names(config).words
    cut = {name: spec.shard_dim for name, spec in GPT2.named_parameters(config).items()}
    ordered = [_with_order(state, given.version_of(shards), config, len(shards.states)) for state in shards.states]
    weights = {}
    for name in ordered[0]:
        ours = names.get(name, name)
        parts = [_tensor(state, name, shards) for state in ordered]
        weights[ours] = _joined(parts, cut[words] if name == HEAD else cut.get(ours), f"{shards.folder}: {name}")
    _check_head(weights, words, shards)
    weights[words] = weights[words][: config.vocab_size]
    return WholeModel(config, in_order(weights, config, str(shards.folder)))


def _config(shards: Shards, args: Mapping[str, Any], given: GivenModel) -> ModelConfig:
    first, size = shards.states[0], len(shards.states)
    rows, hidden = _tensor(first, "word_embeddings.weight", shards, dims=2).shape
    heads = _first_size(given.heads, args.get("num_attention_heads"))
    vocab_size = _first_size(given.vocab_size, args.get("vocab_size"))
    layers = len({name.split(".")[1] for name in first if name.startswith("layers.")})
    problems = []
    if not heads:
        problems.append(f"{shards.folder} does not contain the number of heads: give --num-attention-heads")
    elif hidden % heads or heads % size:
        problems.append(
            f"{heads} heads do not divide hidden size {hidden} over {size} ranks: give the right --num-attention-heads"
        )
    if not vocab_size:
        problems.append(
            f"{shards.folder} has {rows * size} rows of tokens, including padding: give --vocab-file or --vocab-size"
        )
    elif vocab_size > rows * size:
        problems.append(f"the vocabulary has {vocab_size} tokens, but {shards.folder} only {rows * size} rows")
    if problems:
        raise ConfigError(problems)
    assert heads and vocab_size
    if layers != args.get("num_layers", layers):
        raise CheckpointError(f"{shards.folder} holds {layers} of {args['num_layers']} layers; some files are missing")
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=len(_tensor(first, "layers.0.mlp.dense_h_to_4h.bias", shards, dims=1)) * size,
        max_position_embeddings=len(_tensor(first, "position_embeddings.weight", shards, dims=2)),
        # Fused with the bias, Megatron's GELU is the tanh approximation; not fused, it is exact.
        openai_gelu=given.openai_gelu or bool(args.get("openai_gelu") or args.get("bias_gelu_fusion")),
        layernorm_epsilon=given.layernorm_epsilon or args.get("layernorm_epsilon") or 1e-5,
        **{name: args[name] for name in _SAME if name in args},
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        eod_token=vocab_size - 1 if given.eod_token is None else given.eod_token,
    )


def _first_size(*values: Any) -> int | None:
    """The first of ``values`` that is a positive integer."""
    return next((value for value in values if type(value) is int and value > 0), None)


def _names(config: ModelConfig) -> dict[str, str]:
    """The names of ``megatron_files`` -> ours."""
    ours = gpt2_names(config)
    names = {"word_embeddings.weight": ours.words, "position_embeddings.weight": ours.positions}
    names |= {f"final_layernorm.{kind}": ours.norm + kind for kind in ("weight", "bias")}
    parameters = [(prefix, layer.parameters) for prefix, layer in GPT2.prefixed_layers(config) if layer.is_block]
    for number, (prefix, specs) in enumerate(parameters):
        names |= {f"layers.{number}.{spec.name}": prefix + spec.name for spec in specs}
    return names


def _with_order(state: State, version: float, config: ModelConfig, size: int) -> State:
    """A rank's weights with the rows of query_key_value as [n, 3, d]."""
    heads = config.num_attention_heads // size
    orders = {0.0: ((3, heads, -1), 0, 1), 1.0: ((heads, -1, 3), 1, 2)}
    if version not in orders:
        return state
    shape, a, b = orders[version]
    return {
        name: tensor.unflatten(0, shape).transpose(a, b).flatten(0, 2)
        if "query_key_value" in name and tensor.dim() and len(tensor) % (3 * heads) == 0
        else tensor
        for name, tensor in state.items()
    }


def _joined(parts: list[Tensor], dim: int | None, folder: str) -> Tensor:
    """A full weight from its shards along ``dim``, or from one of its replicas."""
    try:
        return (parts[0] if dim is None else torch.cat(parts, dim)).float()
    except (RuntimeError, IndexError):
        raise CheckpointError(f"{folder}: the shapes of the ranks' shards do not match") from None


def _check_head(weights: dict[str, Tensor], words: str, shards: Shards) -> None:
    head = weights.pop(HEAD, None)
    if head is not None and not head.equal(weights[words]):
        raise CheckpointError(f"{shards.folder}: the output projection is not the embedding table, as it is here")


def _tensor(state: State, name: str, shards: Shards, *, dims: int | None = None) -> Tensor:
    if name not in state:
        raise CheckpointError(f"{shards.folder} holds no {name}")
    if dims not in (None, state[name].dim()):
        raise CheckpointError(
            f"{shards.folder}: {name} is {list(state[name].shape)}, and should have {dims} dimensions"
        )
    return state[name]
