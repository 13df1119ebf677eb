"""Exports LoRA adapters: merged into the weights, or as a folder that ``peft`` loads onto the Hugging Face model.

r rank, i inputs, o outputs
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.checks import check_numbers
from megatron.common.errors import ConfigError
from megatron.common.reading import is_present
from megatron.config import ModelConfig
from megatron.config.experts import LORA_TARGETS
from megatron.model.huggingface import HF_CONFIG, read_config, source_shapes
from megatron.model.huggingface.llama import family_of
from megatron.tools.convert.full_model import FullModel, check_space_for, write_tensors
from megatron.tools.convert.their_weights import divided


def merge_adapters(model: FullModel, place: Path) -> FullModel:
    """Merge the adapters of ``model``, which has some, into the weights of their layers: W + alpha / r x B A.

    Raises CheckpointError with ``place``, from which the model was read, if a sum is not finite.
    """
    weights = {name: weight for name, weight in model.weights.items() if ".lora." not in name}
    scale = model.config.lora_alpha / model.config.lora_rank
    for layer, a, b in _adapters(model):
        weight = weights[f"{layer}.weight"]
        merged = (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
        check_numbers(place, f"{layer}.weight with its adapter", merged)
        weights[f"{layer}.weight"] = merged
    return FullModel(_without_adapters(model.config), weights, model.description)


def write_peft(folder: Path, model: FullModel, base: str | None) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    A fused layer is split into its matrices, which all get A, and the rows of B for their outputs; this computes the
    same. ``base`` is the name or the path of the Hugging Face model. Raises ConfigError if the model is not of the
    Llama family, or if ``base`` is a folder of another model; ResourceError if the disk has too little space.
    """
    plain = _without_adapters(model.config)
    family_of(plain)
    names = source_shapes(plain)
    if base is not None and is_present(Path(base) / HF_CONFIG):
        _check_base(base, plain, {f"{layer}.weight" for layer, _, _ in _adapters(model)})
    tensors: dict[str, Tensor] = {}
    for layer, a, b in _adapters(model):
        name = f"{layer}.weight"
        for theirs, rows in zip(names[name], divided(name, b, plain), strict=True):
            prefix = f"base_model.model.{theirs.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = a.clone()
            tensors[f"{prefix}.lora_B.weight"] = rows.clone()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": model.config.lora_rank,
        "lora_alpha": model.config.lora_alpha,
        "lora_dropout": model.config.lora_dropout,
        "target_modules": [part for target in model.config.adapted for part in LORA_TARGETS[target]],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    check_space_for(tensors, folder)
    folder.mkdir()
    write_tensors(tensors, folder / "adapter_model.safetensors", max_shard_size=None, metadata={})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _check_base(base: str, config: ModelConfig, adapted: Collection[str]) -> None:
    """Raises ConfigError unless the Hugging Face folder ``base`` has as many layers, and the ``adapted`` weights."""
    theirs = read_config(Path(base))
    if theirs.num_layers != config.num_layers:
        raise ConfigError(f"--base {base} has {theirs.num_layers} layers, and the checkpoint has {config.num_layers}")
    found, expected = (source_shapes(model) for model in (theirs, config))
    places = {name: shape for sources in found.values() for name, shape in sources.items()}
    for name, shape in sorted(item for weight in adapted for item in expected[weight].items()):
        if (place := places.get(name)) != shape:
            is_there = f"is {list(place)}" if place else "does not exist"
            raise ConfigError(f"--base {base}: {name} {is_there}, and that of the checkpoint is {list(shape)}")


def _adapters(model: FullModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, A [r, i] and B [o, r] of each adapted layer; B is [parts, o, r] for a layer of several matrices."""
    for name, a in model.weights.items():
        if name.endswith(".lora.A"):
            layer = name.removesuffix(".lora.A")
            yield layer, a, model.weights[f"{layer}.lora.B"]


def _without_adapters(config: ModelConfig) -> ModelConfig:
    return replace(config, lora_rank=0, lora_alpha=ModelConfig.lora_alpha, lora_dropout=0.0, lora_target=())


def check_adapters(model: FullModel, place: Path) -> None:
    """Raises ConfigError if the model from ``place`` has no adapters."""
    if not model.config.lora_rank:
        raise ConfigError(f"{place} has no adapters: it was trained without --lora-rank")
