"""One model out of what the ranks of another Megatron saved.

t tensor-parallel size, n heads of a rank, d size of a head
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.exchange.megatron_files import Shards, State
from megatron.checkpoint.exchange.outline import POSITIONS, WORDS, layer_prefix, norm_prefix, outline
from megatron.checkpoint.exchange.whole import WholeModel, in_order
from megatron.config import ModelConfig
from megatron.errors import CheckpointError, ConfigError

_OTHER_MODELS = ("swiglu", "geglu", "squared_relu")
"""Arguments that make another model of tensors with the same names."""


@dataclass(frozen=True)
class Said:
    """What the user says of the model; None where the files shall."""

    heads: int | None = None
    vocab_size: int | None = None
    eod_token: int | None = None
    version: float | None = None
    openai_gelu: bool = False
    layernorm_epsilon: float | None = None

    def version_of(self, shards: Shards) -> float:
        """The order of query_key_value, by the checkpoint version that has it."""
        return shards.version if self.version is None else self.version


def whole_model(shards: Shards, said: Said) -> WholeModel:
    """The model in fp32.

    Raises ConfigError for what neither the files nor the user say, CheckpointError where weights are missing,
    of other shapes, or of another model than GPT-2.
    """
    if wrong := [name for name in _OTHER_MODELS if getattr(shards.args, name, False)]:
        raise CheckpointError(f"{shards.place} was trained with {wrong[0]}, and is no GPT-2")
    config = _config(shards, said)
    names = _names(config)
    cut = {name: getattr(tensor, "partition_dim", None) for name, tensor in outline(config).named_parameters()}
    ordered = [_with_order(state, said.version_of(shards), config, len(shards.states)) for state in shards.states]
    weights = {}
    for name in ordered[0]:
        parts = [_tensor(state, name, shards) for state in ordered]
        dim = cut.get(names.get(name, WORDS if name == "head.weight" else name))
        try:
            weights[names.get(name, name)] = parts[0].float() if dim is None else torch.cat(parts, dim).float()
        except (RuntimeError, IndexError):
            raise CheckpointError(f"{shards.place}: the parts of {name} do not fit each other") from None
    _check_head(weights, shards)
    weights[WORDS] = weights[WORDS][: config.vocab_size]
    return WholeModel(config, in_order(weights, config, str(shards.place)))


def _config(shards: Shards, said: Said) -> ModelConfig:
    first, size, args = shards.states[0], len(shards.states), vars(shards.args)
    words = _tensor(first, "word_embeddings.weight", shards)
    hidden, rows = words.size(1), words.size(0) * size
    heads = said.heads or args.get("num_attention_heads")
    vocab_size = said.vocab_size or args.get("vocab_size")
    problems = []
    if not heads:
        problems.append(f"{shards.place} does not say how many heads the model has: give --num-attention-heads")
    elif hidden % heads or heads % size:
        problems.append(f"{heads} heads go neither into {hidden} nor into {size} parts: give --num-attention-heads")
    if not vocab_size:
        problems.append(
            f"{shards.place} has {rows} rows of tokens, padding among them: give --vocab-file or --vocab-size"
        )
    elif vocab_size > rows:
        problems.append(f"the vocabulary has {vocab_size} tokens, and {shards.place} only {rows} rows")
    if problems:
        raise ConfigError(problems)
    return ModelConfig(
        num_layers=len({name.split(".")[1] for name in first if name.startswith("layers.")}),
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=_tensor(first, "layers.0.mlp.dense_h_to_4h.bias", shards).size(0) * size,
        max_position_embeddings=_tensor(first, "position_embeddings.weight", shards).size(0),
        # Megatron's fused bias and GELU is the tanh approximation, whatever it is not fused.
        openai_gelu=said.openai_gelu or bool(args.get("openai_gelu") or args.get("bias_gelu_fusion")),
        layernorm_epsilon=said.layernorm_epsilon or args.get("layernorm_epsilon", 1e-5),
        **_taken(args),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        eod_token=vocab_size - 1 if said.eod_token is None else said.eod_token,
    )


def _taken(args: dict[str, Any]) -> dict[str, Any]:
    same = ("apply_residual_connection_post_layernorm", "attention_dropout", "hidden_dropout", "init_method_std")
    return {name: args[name] for name in same if name in args}


def _names(config: ModelConfig) -> dict[str, str]:
    """The names of ``megatron_files`` -> ours."""
    names = {"word_embeddings.weight": WORDS, "position_embeddings.weight": POSITIONS}
    for name, _ in outline(config).named_parameters():
        number, _, rest = name.partition(".")
        if name.startswith(norm_prefix(config.num_layers)):
            names[f"final_layernorm.{rest}"] = name
        elif name not in names.values():
            names[f"layers.{int(number) - int(layer_prefix(0)[:-1])}.{rest}"] = name
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
        if "query_key_value" in name and tensor.size(0) % (3 * heads) == 0
        else tensor
        for name, tensor in state.items()
    }


def _check_head(weights: dict[str, Tensor], shards: Shards) -> None:
    head = weights.pop("head.weight", None)
    if head is not None and not head.equal(weights[WORDS]):
        raise CheckpointError(f"{shards.place}: the head is another table than the embedding; here both ends share one")


def _tensor(state: State, name: str, shards: Shards) -> Tensor:
    try:
        return state[name]
    except KeyError:
        raise CheckpointError(f"{shards.place} holds no {name}") from None
