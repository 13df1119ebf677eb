"""Hugging Face model formats as tables: settings of config.json, and names and shapes of weights. No torch here.

``Format`` holds the differences between model types; the functions below read and write any format.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, ConfigError, shown
from megatron.config import ModelConfig
from megatron.config.fields import field_problems
from megatron.model.architectures import architecture_of
from megatron.model.spec import LayerSpec, ParameterSpec

Shapes = dict[str, dict[str, tuple[int, ...]]]
"""Name of each weight here to name and shape of its tensors in Hugging Face files."""
Names = Mapping[str, tuple[str, Any]]
"""Field of ModelConfig to its name and default in config.json.

The default is None for a value that a file must have, and 0 for a value that is derived from others.
"""
Fields = dict[str, Any]
"""Values of ModelConfig by field."""
PREFIX = "transformer."
"""Prefix of weight names in files of GPT2LMHeadModel; files of GPT2Model do not have it."""
TOWER = "vision_tower.vision_model."
"""Prefix of the vision encoder's weights; transformers 5 leaves out ``vision_model.``"""
RESIDUAL = "the residual taken before the norm (no --apply-residual-connection-post-layernorm)"
"""Requirement of most formats, for messages."""
_GELU_KINDS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
"""Hugging Face's names of GELU, and whether it is the tanh approximation; for writing, the first match is used."""


_SWITCHES = (
    *("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "norm_topk_prob"),
    *("scale_decoder_outputs", "is_encoder_decoder"),
)
"""Boolean settings of all formats."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Settings that are only kept, or read with the tokenizer; a file in which they are something else is broken."""
_DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")
"""Values of ``torch_dtype``, or ``dtype``, the type of the weights: names of torch."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """Mapping between ``ModelConfig`` and the config.json and weight names of one Hugging Face model type."""

    title: str
    """Name of the format in messages."""
    sizes: Names
    numbers: Names
    fixed: Mapping[str, Any]
    """Settings for which only this value is supported."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for settings that config.json leaves out."""
    multiple: tuple[str, str] | None = ("hidden_size", "num_attention_heads")
    """Two fields; the first must be a multiple of the second."""
    keeps_rows: bool = False
    """Whether embedding rows beyond the tokenizer's vocabulary are kept."""
    read: Callable[[Mapping[str, Any]], tuple[Fields, list[str]]]
    """Further fields from config.json, and a message for each setting that is wrong."""
    derive: Callable[[Fields], Fields] = lambda values: {}
    """Derives fields from others, after all checks."""
    missing: Callable[[ModelConfig], Mapping[str, bool]]
    """Each requirement of the format, and whether a model does not meet it."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Settings of config.json other than ``sizes``, ``numbers`` and ``fixed``."""
    tied: Mapping[str, str]
    """Names of tied weights that files may repeat, to the weight."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of settings in transformers, to the first."""
    names: Callable[[ModelConfig, int, LayerSpec, str], list[str]]
    """(model, number of transformer layers before the layer, layer, module of the layer) -> modules in files."""
    transposes: bool = False
    """Whether linear layers are Conv1D, y = x W + b, instead of y = x W^T + b."""


def canonical(name: str) -> str:
    """The canonical name of a weight: prefixes differ between files."""
    return name.removeprefix(PREFIX).replace(TOWER, "vision_tower.")


def present(name: str, names: Container[str]) -> str:
    """The variant of ``name`` that is in ``names`` of a file, with or without prefix."""
    variants = (name, name.removeprefix(PREFIX), canonical(name))
    return next((variant for variant in variants if variant in names), canonical(name))


_OTHER_NAMES = {
    "rotary_base": "rope_theta",
    "pre_tokens": "sliding_window",
    "eod_token": "eos_token_id",
    "rope_scaling_factor": "factor",
    "rotary_seq_len_interpolation_factor": "factor",
    "yarn_rotary_scaling_factor": "factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
    "vision_num_layers": "vision_config: num_hidden_layers",
    "vision_hidden_size": "vision_config: hidden_size",
    "vision_image_size": "vision_config: image_size",
    "vision_patch_size": "vision_config: patch_size",
    "vision_ffn_hidden_size": "vision_config: intermediate_size",
    "vision_num_attention_heads": "vision_config: num_attention_heads",
    "vision_layernorm_epsilon": "vision_config: layer_norm_eps",
}
"""Fields of ModelConfig that formats read in functions of their own, to their names in config.json, for messages."""


def config_from(form: Format, tree: Mapping[str, Any], path: Path, vocab_size: int | None) -> ModelConfig:
    """The model described by ``tree``, the config.json at ``path``; ``vocab_size`` is the tokenizer's, if known.

    Raises CheckpointError with a line for each setting that is wrong or not supported.
    """
    problems = [
        f"{alias} is {shown(tree[alias])}, and {name}, the same setting, is {shown(tree[name])}"
        for alias, name in form.aliases.items()
        if alias in tree and tree.get(name, tree[alias]) != tree[alias]
    ]
    tree = {**form.defaults, **{form.aliases[name]: tree[name] for name in form.aliases.keys() & tree.keys()}, **tree}
    values, more = _read_values(form, tree)
    problems += more
    fields, more = form.read(tree)
    values |= fields
    problems += more
    if form.multiple and not problems:
        large, factor = (values[field] for field in form.multiple)
        if large % (factor or large):
            names = [form.sizes[field][0] for field in form.multiple]
            problems.append(f"{names[0]} {large} is not a multiple of {names[1]} {factor}")
    if not problems and (vocab_size or 0) > values["vocab_size"]:
        problems.append(f"vocab_size is {values['vocab_size']}, and its tokenizer has {vocab_size} tokens")
    if not problems and 0 < values.get("num_experts", 0) < values["moe_router_topk"]:
        problems.append(f"num_experts_per_tok is {values['moe_router_topk']}, of {values['num_experts']} experts")
    if problems:
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    if not form.keeps_rows:
        values["vocab_size"] = vocab_size or values["vocab_size"]
    values["padded_vocab_size"] = values["vocab_size"]
    values |= form.derive(values)
    theirs = _OTHER_NAMES | {field: name for field, (name, _) in {**form.sizes, **form.numbers}.items()}
    if problems := field_problems(ModelConfig, values, names=theirs):
        raise CheckpointError(f"{path}: {problem}" for problem in problems)
    return ModelConfig(**values)


def _read_values(form: Format, tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    given = {name: value for name, value in tree.items() if value is not None}
    names = {**form.sizes, **form.numbers}
    values: Fields = {field: given.get(name, default) for field, (name, default) in names.items()}
    problems = ["quantization_config: weights must be of floating point"] if given.get("quantization_config") else []
    problems += [
        f"{name} is {shown(tree[name])}, and only {value!r} can be taken over"
        for name, value in form.fixed.items()
        if name in tree and tree[name] != value
    ]
    problems += [
        f"{name} is {shown(given[name])}, and should be true or false"
        for name in _SWITCHES
        if type(given.get(name, False)) is not bool
    ]
    problems += [
        f"{name} is {shown(given[name])}, and should be the number of a token, or a list of such numbers"
        for name in _TOKENS
        if not _are_tokens(given.get(name))
    ]
    problems += _unknown_ends(given.get("eos_token_id"), values.get("vocab_size"))
    problems += [
        f"{name} is {shown(given[name])}, and should be one of {', '.join(_DTYPES[:4])}"
        for name in ("torch_dtype", "dtype")
        if given.get(name, _DTYPES[0]) not in _DTYPES
    ]
    problems += [
        f"{name} is {shown(values[field])}, and should be a whole number above 0"
        for field, (name, default) in form.sizes.items()
        if (name in given or default is None) and (type(values[field]) is not int or values[field] < 1)
    ]
    problems += [
        f"{name} is {shown(values[field])}, and should be a number"
        for field, (name, _) in form.numbers.items()
        if type(values[field]) not in (int, float)
    ]
    return values, problems


def config_to(form: Format, config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of config.json for ``config`` with weights of ``dtype`` (such as float32).

    Raises ConfigError with a line for each setting that the format does not support.
    """
    if problems := [name for name, is_missing in form.missing(config).items() if is_missing]:
        raise ConfigError(
            f"the model was trained without {name}, which Hugging Face's {form.title} has; use merge"
            for name in problems
        )
    values = {name: getattr(config, field) for field, (name, _) in {**form.sizes, **form.numbers}.items()}
    return {**form.fixed, **values, **form.write(config), "torch_dtype": dtype}


def shapes_of(form: Format, config: ModelConfig) -> Shapes:
    """Name of each weight here to name and shape of its tensors in Hugging Face files, in the order of the layers.

    One weight here holds Q, K and V; keys and values of cross-attention; gate and up; or a matrix of all experts.
    """
    sources: Shapes = {}
    for ours, block, layer, parameter in _parameters(config):
        sizes = config.vision_model if layer.part == "vision" else config
        groups = sizes.query_groups * sizes.head_size
        rows = (sizes.num_attention_heads * sizes.head_size, groups, groups)
        module, _, kind = parameter.name.rpartition(".")
        names, shape = form.names(config, block, layer, module), parameter.shape
        if form.transposes and layer.is_block:
            shape = shape[::-1]
        shapes = [shape]
        if module.startswith("mlp.experts"):
            shapes = [shape[-2:]] * len(names)
        elif len(names) == 3:
            shapes = [(size, *shape[1:]) for size in rows]
        elif len(names) == 2:
            shapes = [shape[1:] if module == "mlp.dense_h_to_4h" else (shape[0] // 2, *shape[1:])] * 2
        theirs = ["cls.predictions.bias"] if kind == "word_bias" else [f"{name}.{kind}" for name in names]
        sources[ours] = dict(zip(theirs, shapes, strict=True))
    return sources


def _parameters(config: ModelConfig) -> Iterator[tuple[str, int, LayerSpec, ParameterSpec]]:
    """(name, number of transformer layers before its layer, layer, spec) of each weight, in the order of the layers."""
    block = 0
    for prefix, layer in architecture_of(config).prefixed_layers(config):
        for parameter in layer.parameters:
            yield prefix + parameter.name, block, layer, parameter
        block += layer.is_block


def gelu_name(config: ModelConfig) -> str:
    """Hugging Face's name of the GELU variant."""
    return next(name for name, is_tanh in _GELU_KINDS.items() if is_tanh == config.openai_gelu)


def read_gelu(name: str, kind: Any) -> tuple[Fields, list[str]]:
    """The ModelConfig field for the GELU variant ``kind`` of setting ``name``, and a message if it is not a GELU."""
    if str(kind) not in _GELU_KINDS:
        return {}, [f"{name} is {kind!r}, and can be {' or '.join(_GELU_KINDS)}"]
    return {"openai_gelu": _GELU_KINDS[kind]}, []


def _are_tokens(value: Any) -> bool:
    """Whether the value of a setting such as eos_token_id has its type: a number, several of them, or None."""
    return value is None or all(type(id) is int for id in (value if isinstance(value, list) else [value]))


_GPT2_END = 50256
"""The end of documents that transformers writes for a GPT-2 with any vocabulary."""


def _unknown_ends(ends: Any, size: Any) -> list[str]:
    """A message for each number of ``eos_token_id`` that is none of ``size`` tokens; -1 is no token."""
    ends = ends if isinstance(ends, list) else [ends]
    unknown = [end for end in ends if type(end) is type(size) is int and end != _GPT2_END and not -1 <= end < size]
    return [f"eos_token_id is {shown(end)}, and the model has {shown(size)} tokens" for end in unknown]


def read_end(tree: Mapping[str, Any]) -> Fields:
    """The ModelConfig field for ``eos_token_id``, of which the first counts if there are several."""
    end = tree.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    return {"eod_token": end} if type(end) is int else {}


def named(blocks: str, parts: Mapping[str, tuple[str, ...]], others: Mapping[str, str]) -> Callable[..., list[str]]:
    """A function for ``Format.names``: ``parts`` maps modules of transformer layers, ``others`` all other layers."""

    def names(config: ModelConfig, block: int, layer: LayerSpec, module: str) -> list[str]:
        if layer.is_block:
            return [f"{blocks}.{block}.{name}" for name in parts[module]]
        return [others[layer.class_name if layer.class_name in others else module]]

    return names


def _read_gpt2(tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    fields, problems = read_gelu("activation_function", tree.get("activation_function", "gelu_new"))
    return fields | read_end(tree), problems


GPT2_FORMAT = Format(
    title="GPT-2",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    sizes={
        "num_layers": ("n_layer", 12),
        "hidden_size": ("n_embd", 768),
        "num_attention_heads": ("n_head", 12),
        "ffn_hidden_size": ("n_inner", 0),
        "max_position_embeddings": ("n_positions", 1024),
        "vocab_size": ("vocab_size", 50257),
    },
    numbers={
        "layernorm_epsilon": ("layer_norm_epsilon", 1e-5),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
        "init_method_std": ("initializer_range", 0.02),
    },
    fixed={
        "model_type": "gpt2",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    read=_read_gpt2,
    derive=lambda values: {
        "ffn_hidden_size": values["ffn_hidden_size"] or 4 * values["hidden_size"],
        "eod_token": values.get("eod_token", values["vocab_size"] - 1),
    },
    missing=lambda config: {
        "biases in all linear layers": not config.linear_bias,
        "an output projection that is the embedding": config.untie_embeddings_and_output_weights,
        "a table of positions": not config.has_position_table,
        "heads of hidden size / heads": config.head_size * config.num_attention_heads != config.hidden_size,
        "keys and values for each head": config.query_groups != config.num_attention_heads,
        "queries and keys that are not normalized": config.qk_layernorm,
        RESIDUAL: config.apply_residual_connection_post_layernorm,
        f"attention to all {config.max_position_embeddings} positions (--pre-tokens {config.pre_tokens})": (
            config.has_window
        ),
    },
    write=lambda config: {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": config.eod_token,
        "eos_token_id": config.eod_token,
        "activation_function": gelu_name(config),
        "embd_pdrop": config.hidden_dropout,
    },
    tied={"lm_head.weight": f"{PREFIX}wte.weight"},
    names=named(
        f"{PREFIX}h",
        {
            "input_layernorm": ("ln_1",),
            "attention.query_key_value": ("attn.c_attn",),
            "attention.dense": ("attn.c_proj",),
            "post_attention_layernorm": ("ln_2",),
            "mlp.dense_h_to_4h": ("mlp.c_fc",),
            "mlp.dense_4h_to_h": ("mlp.c_proj",),
        },
        {"WordEmbedding": f"{PREFIX}wte", "PositionEmbedding": f"{PREFIX}wpe", "LayerNorm": f"{PREFIX}ln_f"},
    ),
    transposes=True,
)
