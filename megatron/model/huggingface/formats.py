"""Hugging Face model formats as tables: settings of config.json, and names and shapes of weights. No torch here.

``Format`` holds the differences between model types; the functions below read and write any format.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.common.errors import CheckpointError, ConfigError, shown
from megatron.common.reading import type_problem
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
_GPT2_END = 50256
"""The end of documents that transformers writes for a GPT-2 with any vocabulary."""
_Dtype = Literal["bfloat16", "float16", "float32", "float64", "half", "float", "double"]
"""Names of types of weights in torch."""
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), bool),
    **dict.fromkeys(("norm_topk_prob", "scale_decoder_outputs", "is_encoder_decoder"), bool),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), int | list[int]),
    **dict.fromkeys(("torch_dtype", "dtype"), _Dtype),
}
"""Types of settings of all formats that are no numbers of ``ModelConfig``."""


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
    further: Mapping[str, str] = field(default_factory=dict)
    """Names in config.json of fields that ``read`` returns, for messages."""
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
    theirs = {**form.further, **{field: name for field, (name, _) in {**form.sizes, **form.numbers}.items()}}
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
        f"{name} is {shown(given[name])}: {problem}"
        for name, kind in _TYPES.items()
        if name in given and (problem := type_problem(kind, given[name]))
    ]
    ends, size = given.get("eos_token_id"), values.get("vocab_size")
    problems += [
        f"eos_token_id is {shown(end)}, and the model has {shown(size)} tokens"
        for end in (ends if isinstance(ends, list) else [ends])
        if type(end) is type(size) is int and end != _GPT2_END and not -1 <= end < size  # -1 is no token
    ]
    problems += [
        f"{name} is {shown(values[field])}, and should be a whole number above 0"
        for field, (name, default) in form.sizes.items()
        if (name in given or default is None) and (type(values[field]) is not int or values[field] < 1)
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
