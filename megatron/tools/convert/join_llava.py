"""Joins a vision encoder and a language model in Hugging Face folders into a LLaVA with a new projector."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.huggingface import our_weights
from megatron.common.errors import CheckpointError, ConfigError, shown
from megatron.config import ModelConfig
from megatron.model.architectures import LLAVA
from megatron.model.huggingface import HF_CONFIG, read_json, source_shapes
from megatron.model.huggingface.formats import TOWER
from megatron.model.huggingface.llama import family_of
from megatron.model.huggingface.llava import read_encoder
from megatron.parallel.tensor.layers import WeightInit
from megatron.tools.convert.full_model import FullModel, check_sizes, read_tensors
from megatron.tools.convert.load_and_save import read_huggingface

_MULTIPLE = 64
"""If the word embedding gets rows for the placeholder, their number is rounded up to a multiple of this."""
_EMBEDDINGS = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")


def joined_llava(encoder: Path, language: Path, image_token: int, feature_layer: int, seed: int) -> FullModel:
    """Build a LLaVA with the weights of both folders, and a projector initialized from ``seed``.

    If the vocabulary does not contain the placeholder ``image_token``, the embedding gets new rows with the mean of all
    others. Raises CheckpointError unless the folders have a vision encoder and a model of the Llama family; ConfigError
    for a placeholder far beyond the vocabulary.
    """
    text = read_huggingface(language).config
    try:
        family_of(text)
    except ConfigError as error:
        raise CheckpointError(f"{language}: it is not a model of the Llama family: {error.messages[0]}") from error
    config = replace(_with_encoder(text, encoder, feature_layer), image_token_id=image_token)
    if image_token >= config.vocab_size + _MULTIPLE:
        raise ConfigError(
            f"--image-token-id {image_token} is far beyond the {config.vocab_size} tokens of {language}: the next "
            f"free one is {config.vocab_size}"
        )
    if image_token >= config.vocab_size:
        rows = -(-(image_token + 1) // _MULTIPLE) * _MULTIPLE
        config = replace(config, vocab_size=rows, padded_vocab_size=rows)
    tensors = {f"language_model.{name}": tensor for name, tensor in read_tensors(language).items()}
    tensors |= {f"{TOWER}{name}": tensor for name, tensor in _encoder_tensors(encoder).items()}
    source = f"{encoder} and {language}"
    check_sizes(config, len(tensors), source)
    for name in _EMBEDDINGS:
        if name in tensors:
            table = tensors[name]
            new_rows = table.mean(0, keepdim=True).expand(config.vocab_size - len(table), -1)
            tensors[name] = torch.cat([table, new_rows.to(table.dtype)])
    dtype = tensors[_EMBEDDINGS[0]].dtype
    with torch.device("meta"):
        tensors |= _new_projector(config, seed, dtype)
    weights = our_weights(tensors, config, source)  # compares shapes, and reads ``tensors`` later
    tensors |= _new_projector(config, seed, dtype)
    return FullModel(config, weights)


def _with_encoder(text: ModelConfig, folder: Path, feature_layer: int) -> ModelConfig:
    """The config of ``text`` with the encoder in ``folder``, which may also contain a text model, as CLIP does."""
    tree = read_json(folder / HF_CONFIG)
    kind = str(tree.get("model_type")).removesuffix("_vision_model")
    vision = tree.get("vision_config", tree)
    if not isinstance(vision, Mapping):
        raise CheckpointError(f"{folder / HF_CONFIG}: vision_config is {shown(vision)}, and should be an object")
    fields, problems = read_encoder({**vision, "model_type": f"{kind}_vision_model", "vision_use_head": False})
    if problems:
        raise CheckpointError(
            f"{folder / HF_CONFIG}: {problem.removeprefix('vision_config: ')}" for problem in problems
        )
    strategy = "default" if kind == "clip" else "full"
    config = replace(
        text,
        architecture=LLAVA.name,
        **fields,
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=strategy,
    )
    if not 1 <= config.vision_layers <= config.vision_num_layers:
        layers = f"the {config.vision_num_layers} layers of {folder}"
        raise ConfigError(f"--vision-feature-layer {feature_layer} is not one of {layers}")
    return replace(config, num_layers=text.num_layers + config.vision_layers)


def _encoder_tensors(folder: Path) -> dict[str, Tensor]:
    """The weights of the encoder by name, without weights of a text model or a pooling head."""
    tensors, prefix = read_tensors(folder), "vision_model."
    names = [name for name in tensors if name.startswith(prefix)] or list(tensors)
    known = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
    short = {name.removeprefix(prefix): name for name in names}
    return {
        name: tensors[full] for name, full in short.items() if name.startswith(known) and "position_ids" not in name
    }


def _new_projector(config: ModelConfig, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    drawn = {}
    for sources in source_shapes(config).values():
        for name, shape in sources.items():
            if name.startswith("multi_modal_projector.") and len(shape) > 1:
                drawn[name] = WeightInit(config.init_method_std, seed, name).draw(shape).to(dtype)
                drawn[name.replace("weight", "bias")] = torch.zeros(shape[0], dtype=dtype)
    return drawn
