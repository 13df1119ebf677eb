"""Hugging Face format of LLaVA: a vision encoder (CLIP or SigLIP), and a language model of the Llama family.

No torch here.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron.common.errors import CheckpointError, shown
from megatron.config import ModelConfig
from megatron.config.fields import field_problems, inside
from megatron.config.vision import PADDED, PIXELS, STRETCH
from megatron.model.architectures import LLAVA
from megatron.model.huggingface.formats import TOWER, Fields, Format, Names, config_from, config_to, named
from megatron.model.huggingface.llama import LLAMA_FORMATS, family_of
from megatron.model.spec import LayerSpec

SHAPE = (
    *("vision_encoder", "vision_num_layers", "vision_hidden_size", "vision_ffn_hidden_size"),
    *("vision_num_attention_heads", "vision_image_size", "vision_patch_size", "vision_feature_layer"),
    *("vision_feature_select_strategy", "image_token_id"),
)
"""Flags that determine the weights of LLaVA only."""
OTHER_FLAGS = ("vision_layernorm_epsilon",)
_MODEL_TYPES = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
_DEFAULTS: dict[str, Names] = {
    "clip": {
        "vision_num_layers": ("num_hidden_layers", 12),
        "vision_hidden_size": ("hidden_size", 768),
        "vision_ffn_hidden_size": ("intermediate_size", 3072),
        "vision_num_attention_heads": ("num_attention_heads", 12),
        "vision_image_size": ("image_size", 224),
        "vision_patch_size": ("patch_size", 32),
        "vision_layernorm_epsilon": ("layer_norm_eps", 1e-5),
    }
}
_DEFAULTS["siglip"] = {
    **_DEFAULTS["clip"],
    "vision_patch_size": ("patch_size", 16),
    "vision_layernorm_epsilon": ("layer_norm_eps", 1e-6),
}
_FIXED: dict[str, Mapping[str, Any]] = {
    "clip": {"hidden_act": "quick_gelu", "num_channels": 3},
    "siglip": {"hidden_act": "gelu_pytorch_tanh", "num_channels": 3, "vision_use_head": False},
}
_NUMBER, _COUNT = ((int, float), "a number above 0"), ((int,), "a whole number above 0")
"""The types of an epsilon and of a size, and what they are called."""
_DEFAULT = {"vision_use_head": True}
"""Defaults in transformers of settings in ``_FIXED``, if they differ from the supported value."""


def read_encoder(tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """The fields of the vision encoder described by ``vision_config``, and a message for each wrong setting."""
    kind = next((kind for kind, name in _MODEL_TYPES.items() if tree.get("model_type") == name), None)
    if kind is None:
        names = " or ".join(_MODEL_TYPES.values())
        return {}, [f"vision_config: model_type is {shown(tree.get('model_type'))}, and can be {names}"]
    values = {field: tree.get(name, default) for field, (name, default) in _DEFAULTS[kind].items()}
    problems = [
        f"vision_config: {_DEFAULTS[kind][field][0]} is {shown(value)}, and should be {what}"
        for field, value in values.items()
        for kinds, what in [_NUMBER if field == "vision_layernorm_epsilon" else _COUNT]
        if type(value) not in kinds or not inside(value, "(0, inf)")
    ]
    theirs = {field: f"vision_config: {name}" for field, (name, _) in _DEFAULTS[kind].items()}
    problems = problems or field_problems(ModelConfig, values, names=theirs)
    problems += [
        f"vision_config: {name} is {shown(tree.get(name, _DEFAULT.get(name)))}, and only {value!r} can be taken over"
        for name, value in _FIXED[kind].items()
        if tree.get(name, _DEFAULT.get(name, value)) != value
    ]
    return {"vision_encoder": kind, **values}, problems


PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of a folder's processor of images; the latter has them under ``image_processor``."""


def read_image_fit(tree: Mapping[str, Any], config: ModelConfig, path: Path) -> str:
    """``image_fit`` of a model with the image processor ``tree``, read from ``path``.

    Raises CheckpointError with a line for each setting of which images would not be squares of the model's size, or
    would have other colors.
    """
    n, is_clip = config.vision_image_size, "siglip" not in str(tree.get("image_processor_type", "")).lower()
    square, shortest = {"height": n, "width": n}, {"shortest_edge": n}
    mean, deviation = map(list, PIXELS[config.vision_encoder])
    colors = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": mean}
    fixed = {"do_resize": True, "resample": 3, **colors, "image_std": deviation}
    small = {"height": 224, "width": 224}  # defaults in transformers
    given = {**fixed, "size": {"shortest_edge": 224} if is_clip else small, "crop_size": small}
    given |= {"do_center_crop": is_clip, "do_pad": False} | {
        key: each for key, each in tree.items() if each is not None
    }
    for key in ("size", "crop_size"):  # older files have a number
        if type(edge := given[key]) is int:
            is_shortest = is_clip and key == "size"
            given[key] = {"shortest_edge": edge} if is_shortest else {"height": edge, "width": edge}
    supported = {name: [value] for name, value in fixed.items()} | {"size": [square, shortest]}
    if given["do_center_crop"]:
        supported["crop_size"] = [square]
    elif given["size"] == shortest and not given["do_pad"]:
        supported["do_center_crop"] = [True]
    if problems := [
        f"{path}: {name} is {shown(given[name])}, and can be {' or '.join(map(str, values))}"
        for name, values in supported.items()
        if given[name] not in values
    ]:
        raise CheckpointError(problems)
    if given["do_pad"]:
        return PADDED[config.vision_encoder]
    return "crop" if given["size"] == shortest else STRETCH


def _read(tree: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    text = tree.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in LLAMA_FORMATS:
        return {}, [f"text_config: model_type must be one of {', '.join(LLAMA_FORMATS)}"]
    try:
        tied = {"tie_word_embeddings": tree.get("tie_word_embeddings", False)} | dict(text)
        language = config_from(LLAMA_FORMATS[text["model_type"]], tied, Path("text_config"), None)
    except CheckpointError as error:
        return {}, list(error.messages)
    vision = tree.get("vision_config") or {}
    if not isinstance(vision, Mapping):
        return {}, [f"vision_config is {shown(vision)}, and should be an object"]
    encoder, problems = read_encoder(vision)
    values = {field.name: getattr(language, field.name) for field in fields(language)} | encoder
    values |= {
        "architecture": LLAVA.name,
        "image_token_id": tree.get("image_token_index", 32000),
        "vision_feature_layer": tree.get("vision_feature_layer", -2),
        "vision_feature_select_strategy": tree.get("vision_feature_select_strategy", "default"),
    }
    token = values["image_token_id"]
    if type(token) is not int or not 0 <= token < language.vocab_size:
        problems.append(f"image_token_index is {shown(token)}, and the model has {language.vocab_size} tokens")
    if type(values["vision_feature_layer"]) is not int:
        problems.append(f"vision_feature_layer is {shown(values['vision_feature_layer'])}, and should be one number")
    elif not problems:
        values["num_layers"] += ModelConfig(**{field: values[field] for field in _LAYERS}).vision_layers
    return values, problems


_LAYERS = ("vision_num_layers", "vision_feature_layer")


def _write(config: ModelConfig) -> dict[str, Any]:
    family, kind = family_of(config.language_model), config.vision_encoder
    text = config_to(LLAMA_FORMATS[family.model_type], config.language_model, config.dtype)
    del text["architectures"], text["torch_dtype"]
    sizes = {name: getattr(config, field) for field, (name, _) in _DEFAULTS[kind].items()}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": _MODEL_TYPES[kind], **_FIXED[kind], **sizes},
        "image_token_index": config.image_token_id,
        "image_seq_length": config.image_tokens,
        "vision_feature_layer": config.vision_feature_layer,
        "vision_feature_select_strategy": config.vision_feature_select_strategy,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


_vision_names = named(
    f"{TOWER}encoder.layers",
    {
        "input_layernorm": ("layer_norm1",),
        "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.dense": ("self_attn.out_proj",),
        "post_attention_layernorm": ("layer_norm2",),
        "mlp.dense_h_to_4h": ("mlp.fc1",),
        "mlp.dense_4h_to_h": ("mlp.fc2",),
    },
    {},
)


def _names(config: ModelConfig, block: int, layer: LayerSpec, module: str) -> list[str]:
    if layer.part == "vision" and layer.is_block:
        return _vision_names(config, block, layer, module)
    if layer.class_name == "PatchEmbedding":
        return [f"{TOWER}{module if module == 'pre_layrnorm' else f'embeddings.{module}'.rstrip('.')}"]
    if not layer.part:
        return [f"{TOWER}{module}"]
    if layer.part == "projector":
        return [f"multi_modal_projector.{module}"]
    if layer.class_name == "ImageEmbedding":
        return ["language_model.model.embed_tokens"]
    names = LLAMA_FORMATS["llama"].names(config.language_model, block - config.vision_layers, layer, module)
    return [f"language_model.{name}" for name in names]


LLAVA_FORMAT = Format(
    title="LLaVA",
    aliases={"image_token_id": "image_token_index"},
    sizes={},
    numbers={},
    fixed={"model_type": "llava", "projector_hidden_act": "gelu", "multimodal_projector_bias": True},
    multiple=None,
    keeps_rows=True,
    read=_read,
    missing=lambda config: {},
    write=_write,
    tied={
        name: "language_model.model.embed_tokens.weight" for name in ("language_model.lm_head.weight", "lm_head.weight")
    },
    names=_names,
)
