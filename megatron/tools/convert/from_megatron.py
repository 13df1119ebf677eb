"""Converts GPT and Llama models in checkpoints of other Megatrons to models of this suite.

The configuration follows from shapes and names of weights as far as possible; the rest is read from the saved arguments
or given by the user.

n heads (of one rank where shards are merged), g query groups, d head size, f hidden size of the MLP, h hidden size
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.across_ranks import check_equal
from megatron.checkpoint.checks import check_numbers, form_errors
from megatron.common.errors import CheckpointError, ConfigError, shown
from megatron.config import ModelConfig
from megatron.config.fields import field_problems
from megatron.model.architectures import GPT2
from megatron.model.spec import ParameterSpec
from megatron.tools.convert.full_model import FullModel, in_layer_order
from megatron.tools.convert.megatron_files import HEAD, HEAD_COPY, Shards, State, tensor_of

_UNSUPPORTED = (
    *("geglu", "quick_geglu", "squared_relu", "apply_layernorm_1p", "num_experts", "multi_latent_attention"),
    *("rotary_interleaved", "window_size", "no_rope_freq", "qk_l2_norm", "mtp_num_layers", "attention_output_gate"),
)
"""Arguments of models that are not supported, although some have the same tensor names."""
_SAME_MEANING = (
    *("apply_residual_connection_post_layernorm", "attention_dropout", "hidden_dropout", "init_method_std"),
    *("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor"),
)
"""Arguments with the same meaning in this suite."""


@dataclass(frozen=True)
class GivenModel:
    """Properties of the model given by the user; None for properties that are read from the files."""

    heads: int | None = None
    vocab_size: int | None = None
    eod_token: int | None = None
    version: float | None = None
    openai_gelu: bool = False
    layernorm_epsilon: float | None = None
    position_embedding_type: str | None = None
    rotary_base: float | None = None
    max_position_embeddings: int | None = None


def config_of(shards: Shards, given: GivenModel) -> ModelConfig:
    """The configuration of the model, without vocabulary padding.

    Raises ConfigError if a property is neither in the files nor given, CheckpointError if the files contradict each
    other or have a model of another kind.
    """
    args, first = _arguments(shards), shards.states[0]
    _check_given(shards, args, given)
    columns = tensor_of(shards, "layers.0.attention.dense.weight").size(1) * len(shards.states)
    heads, vocab_size = _heads_and_vocabulary(shards, args, given, columns)
    has_bias = "layers.0.attention.dense.bias" in first
    fields = {name: args[name] for name in _SAME_MEANING if name in args} | _positions(shards, args, given)
    return ModelConfig(
        num_attention_heads=heads,
        **_sizes_of_layers(shards, args, heads, columns),
        normalization=_normalization(shards),
        disable_bias_linear=not has_bias,
        add_qkv_bias=not has_bias and "layers.0.attention.query_key_value.bias" in first,
        qk_layernorm="layers.0.attention.q_layernorm.weight" in first,
        untie_embeddings_and_output_weights=_is_untied(shards, args),
        # Megatron's GELU is the tanh approximation if it is fused with the bias, else exact.
        openai_gelu=given.openai_gelu or bool(args.get("openai_gelu") or args.get("bias_gelu_fusion")),
        layernorm_epsilon=given.layernorm_epsilon or args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        **fields,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        eod_token=vocab_size - 1 if given.eod_token is None else given.eod_token,
    )


def _arguments(shards: Shards) -> dict[str, Any]:
    """The saved arguments that are numbers. Raises CheckpointError for a model that is not supported."""
    saved = vars(shards.args)
    if wrong := [name for name in _UNSUPPORTED if saved.get(name) and saved[name] != [1]]:
        flag = "--" + wrong[0].replace("_", "-")
        raise CheckpointError(f"{shards.folder} was trained with {flag}, and such a model is not supported")
    return {name: value for name, value in saved.items() if isinstance(value, int | float)}


def _check_given(shards: Shards, args: Mapping[str, Any], given: GivenModel) -> None:
    """Raise ConfigError if a given property is another than that in the files."""
    eps = args.get("norm_epsilon", args.get("layernorm_epsilon"))
    table = "position_embeddings.weight" in shards.states[0]
    length = len(tensor_of(shards, "position_embeddings.weight")) if table else args.get("max_position_embeddings")
    pairs = {
        "num-attention-heads": (given.heads, args.get("num_attention_heads")),
        "layernorm-epsilon": (given.layernorm_epsilon, eps),
        "rotary-base": (given.rotary_base, args.get("rotary_base")),
        "max-position-embeddings": (given.max_position_embeddings, length),
    }
    problems = [
        f"--{flag} {value:g}: {shards.folder} has {saved:g}; leave the flag out"
        for flag, (value, saved) in pairs.items()
        if value is not None and saved is not None and value != saved
    ]
    rotations = {"position-embedding-type": given.position_embedding_type, "rotary-base": given.rotary_base}
    problems += [
        f"--{flag} {value}: {shards.folder} has a table of positions; leave it out"
        for flag, value in rotations.items()
        if table and value is not None and args.get(flag.replace("-", "_")) is None
    ]
    if problems:
        raise ConfigError(problems)


def _sizes_of_layers(shards: Shards, args: Mapping[str, Any], heads: int, columns: int) -> dict[str, Any]:
    """Fields of the configuration that follow from shapes. Raises CheckpointError if a saved argument differs."""
    size = len(shards.states)
    rows = len(tensor_of(shards, "layers.0.attention.query_key_value.weight")) * size
    groups = (rows - columns) // (2 * columns // heads)  # rows are (n + 2 g) d, columns n d
    f = tensor_of(shards, "layers.0.mlp.dense_4h_to_h.weight").size(1)
    sizes = {
        "num_layers": len({name.split(".")[1] for name in shards.states[0] if name.startswith("layers.")}),
        "ffn_hidden_size": f * size,
        "swiglu": len(tensor_of(shards, "layers.0.mlp.dense_h_to_4h.weight")) == 2 * f,
        "num_query_groups": groups,
    }
    table = tensor_of(shards, "word_embeddings.weight")
    hidden, vocabulary = table.size(1), len(table) * size
    found = {**sizes, "hidden_size": hidden, "kv_channels": columns // heads, "padded_vocab_size": vocabulary}
    compared = found.keys() - (set() if args.get("group_query_attention") else {"num_query_groups"})
    for name in (name for name in found if name in compared & args.keys()):
        if args[name] != found[name]:
            flag = f"--{name.replace('_', '-')}"
            raise CheckpointError(f"{shards.folder} holds weights of {flag} {found[name]}, not of {flag} {args[name]}")
    kv_channels = 0 if columns == hidden else columns // heads
    return sizes | {
        "hidden_size": hidden,
        "kv_channels": kv_channels,
        "num_query_groups": 0 if groups == heads else groups,
    }


def _heads_and_vocabulary(shards: Shards, args: Mapping[str, Any], given: GivenModel, columns: int) -> tuple[int, int]:
    sizes = {name: value for name, value in args.items() if type(value) is int and value > 0}
    size, saved_heads = len(shards.states), sizes.get("num_attention_heads")
    heads = saved_heads or given.heads
    vocab_size = given.vocab_size or sizes.get("vocab_size")
    rows = len(tensor_of(shards, "word_embeddings.weight")) * size
    saved, multiple = sizes.get("vocab_size", rows), sizes.get("make_vocab_size_divisible_by", rows)
    multiple *= sizes.get("tensor_model_parallel_size") or sizes.get("model_parallel_size") or size
    if saved > rows or (rows - saved >= multiple and not given.vocab_size):  # the padding is less than a multiple
        advice = "copy all files again" if saved > rows else "give --vocab-size or --vocab-file"
        raise CheckpointError(f"{shards.folder} holds {rows} rows of tokens, not of --vocab-size {saved}: {advice}")
    problems = []
    if not heads:
        problems.append(f"{shards.folder} does not contain the number of heads: give --num-attention-heads")
    elif heads < 0 or columns % heads or heads % size:
        divided = f"{shown(heads)} heads, which do not divide hidden size {columns} over {size} ranks"
        if saved_heads:
            raise CheckpointError(f"{shards.folder} says {divided}: copy all files again")
        problems.append(f"{divided}: give the right --num-attention-heads")
    if not vocab_size:
        problems.append(
            f"{shards.folder} has {rows} rows of tokens, including padding: give --vocab-file or --vocab-size"
        )
    elif not 0 < vocab_size <= rows:
        problems.append(f"the vocabulary has {vocab_size} tokens, but {shards.folder} only {rows} rows")
    if problems or not (heads and vocab_size):
        raise ConfigError(problems)
    return heads, vocab_size


def _normalization(shards: Shards) -> str:
    """The kind of the norms: only LayerNorm has biases. Raises CheckpointError if the saved kind is another."""
    kind = "LayerNorm" if "final_layernorm.bias" in shards.states[0] else "RMSNorm"
    saved = getattr(shards.args, "normalization", None) or kind
    if str(saved).lower() != kind.lower():  # Megatron on DeepSpeed writes it in small letters
        raise CheckpointError(f"{shards.folder} holds weights of {kind}, not of --normalization {saved!s:.40}")
    return kind


def _is_untied(shards: Shards, args: Mapping[str, Any]) -> bool:
    """Whether the output projection is not the word embedding: by the saved argument, else by comparing weights."""
    if HEAD not in shards.states[0]:
        return False
    saved = args.get("untie_embeddings_and_output_weights")
    equal = all(HEAD in state and state[HEAD].equal(state["word_embeddings.weight"]) for state in shards.states)
    return not equal if saved is None else bool(saved)


def _positions(shards: Shards, args: Mapping[str, Any], given: GivenModel) -> dict[str, Any]:
    folder, saved = shards.folder, getattr(shards.args, "position_embedding_type", None)
    rotary = bool(args.get("use_rotary_position_embeddings"))
    if "position_embeddings.weight" in shards.states[0]:
        if rotary or saved not in (None, "learned_absolute"):
            raise CheckpointError(f"{folder} has a table of positions besides other positions, which is not supported")
        rows = len(tensor_of(shards, "position_embeddings.weight"))
        if (length := args.get("max_position_embeddings", rows)) != rows:
            flag = "--max-position-embeddings"
            raise CheckpointError(f"{folder} holds weights of {flag} {rows}, not of {flag} {length}")
        return {"position_embedding_type": "learned_absolute", "max_position_embeddings": rows}
    kind = given.position_embedding_type or ("rope" if rotary else saved)
    length = given.max_position_embeddings or args.get("max_position_embeddings") or args.get("seq_length")
    if kind not in (None, "rope", "none"):
        raise CheckpointError(f"{folder} has positions of the kind {kind!s:.40}, and no such table or support for it")
    problems = []
    if kind is None:
        problems.append(f"{folder} does not say whether positions are rotary: give --position-embedding-type")
    if not length:
        problems.append(f"{folder} does not say how long sequences are: give --max-position-embeddings")
    if problems:
        raise ConfigError(problems)
    base = {"rotary_base": float(given.rotary_base)} if given.rotary_base else {}
    return {"position_embedding_type": kind, "max_position_embeddings": length, **base}


def full_model(shards: Shards, given: GivenModel) -> FullModel:
    """Convert the model, in fp32.

    Raises ConfigError if a property is neither in the files nor given, CheckpointError if weights are missing, have
    other shapes, or belong to another model.
    """
    with form_errors(shards.folder):
        config = config_of(shards, given)
        if problems := field_problems(ModelConfig, vars(config)):
            raise CheckpointError(f"{shards.folder}: {problem}" for problem in problems)
        if not config.max_position_embeddings:
            raise CheckpointError(f"{shards.folder}: position_embeddings.weight has no rows")
        names, specs = _our_names(config), GPT2.named_parameters(config)
        embedding = names[HEAD_COPY] = names["word_embeddings.weight"]
        names.setdefault(HEAD, embedding)
        version = shards.version if given.version is None else given.version
        if version not in (0.0, 1.0, 2.0, 3.0):
            raise CheckpointError(f"{shards.folder} has checkpoint version {version:g}: give --checkpoint-version")
        weights: State = {}
        for name in sorted(shards.states[0], key=(HEAD, HEAD_COPY).__contains__):
            ours = names.get(name, name)
            weight = _merge(shards, name, specs.get(ours), config, version)
            if ours in weights and not weight.equal(weights[ours]):
                raise CheckpointError(
                    f"{shards.folder}: the output projection is not the embedding table, as it is here"
                )
            weights[ours] = weight
    for name, spec in specs.items():
        if spec.is_vocabulary and name in weights:
            weights[name] = weights[name][: config.vocab_size]
    return FullModel(config, in_layer_order(weights, config, str(shards.folder)))


def _our_names(config: ModelConfig) -> dict[str, str]:
    """Names of weights in ``megatron_files`` -> names in this suite."""
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


def _merge(shards: Shards, name: str, spec: ParameterSpec | None, config: ModelConfig, version: float) -> Tensor:
    """Merge the shards of all ranks into the full weight ``name``, in fp32."""
    dim = None if spec is None else spec.shard_dim
    parts = [
        _reorder_rows(name, tensor_of(shards, name, rank=rank), config, version, len(shards.states))
        for rank in range(len(shards.states))
    ]
    if spec is not None and dim is None:
        if misshaped := [part for part in parts if part.shape != spec.shape]:
            return misshaped[0].float()
        for rank, other in enumerate(parts[1:], 1):
            check_equal(shards.folder, f"{name} of tensor-parallel rank {rank}", other, parts[0], "rank 0")
    weight = (parts[0] if dim is None else torch.cat(parts, dim)).float()
    check_numbers(shards.folder, name, weight)
    return weight


_QKV_ORDERS: Mapping[float, tuple[tuple[int, ...], tuple[int, int]]] = {
    0.0: ((3, 0, -1), (0, 1)),
    1.0: ((0, -1, 3), (1, 2)),
}
"""Checkpoint version -> shape of the rows of query_key_value, with 0 for n, and the two dimensions to transpose."""


def _reorder_rows(name: str, tensor: Tensor, config: ModelConfig, version: float, size: int) -> Tensor:
    """A rank's tensor, with query_key_value in the order [n, 3, d], and gate and up projections as [2, f, ..]."""
    heads, is_grouped = config.num_attention_heads // size, config.query_groups < config.num_attention_heads
    if "query_key_value" in name and version in _QKV_ORDERS and not is_grouped and len(tensor) % (3 * heads) == 0:
        shape, dims = _QKV_ORDERS[version]
        return tensor.unflatten(0, [part or heads for part in shape]).transpose(*dims).flatten(0, 2)
    return tensor.unflatten(0, (2, -1)) if config.is_gated and "dense_h_to_4h" in name else tensor
