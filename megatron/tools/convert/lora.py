"""Exports LoRA adapters: merged into the weights, or as a folder that ``peft`` loads onto the Hugging Face model.

r rank, i inputs, o outputs
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.huggingface import divided
from megatron.common.errors import ConfigError
from megatron.config import ModelConfig
from megatron.config.experts import LORA_TARGETS
from megatron.model.huggingface import HF_CONFIG, read_config, source_shapes
from megatron.model.huggingface.formats import Shapes
from megatron.model.huggingface.llama import family_of
from megatron.tools.convert.full_model import FullModel


def merge_adapters(model: FullModel) -> FullModel:
    """Merge the adapters of ``model`` into the weights of their layers: W + alpha / r x B A.

    Raises ConfigError if the model has no adapters.
    """
    _check_adapters(model)
    weights = {name: weight for name, weight in model.weights.items() if ".lora." not in name}
    scale = model.config.lora_alpha / model.config.lora_rank
    for layer, a, b in _adapters(model):
        weight = weights[f"{layer}.weight"]
        weights[f"{layer}.weight"] = (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
    return FullModel(_without_adapters(model.config), weights, model.description)


def write_peft(folder: Path, model: FullModel, base: str | None) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    A fused layer is split into its matrices, which all get A, and the rows of B for their outputs; this computes the
    same. ``base`` is the name or the path of the Hugging Face model. Raises ConfigError if the model has no
    adapters or is not of the Llama family, or if ``base`` is a folder of another model.
    """
    _check_adapters(model)
    plain = _without_adapters(model.config)
    family_of(plain)
    names = source_shapes(plain)
    if base is not None and (Path(base) / HF_CONFIG).is_file():
        _check_base(base, {f"{layer}.weight" for layer, _, _ in _adapters(model)}, names)
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
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _check_base(base: str, adapted: Collection[str], shapes: Shapes) -> None:
    """Raises ConfigError unless the weights ``adapted`` have these ``shapes`` in the Hugging Face folder ``base``."""
    found = {
        name: shape for sources in source_shapes(read_config(Path(base))).values() for name, shape in sources.items()
    }
    expected = {name: shape for weight in adapted for name, shape in shapes[weight].items()}
    for name, shape in sorted(expected.items()):
        if (theirs := found.get(name)) != shape:
            is_there = f"is {list(theirs)}" if theirs else "does not exist"
            raise ConfigError(f"--base {base}: {name} {is_there}, and that of the checkpoint is {list(shape)}")


def _adapters(model: FullModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, A [r, i] and B [o, r] of each adapted layer; B is [parts, o, r] for a layer of several matrices."""
    for name, a in model.weights.items():
        if name.endswith(".lora.A"):
            layer = name.removesuffix(".lora.A")
            yield layer, a, model.weights[f"{layer}.lora.B"]


def _without_adapters(config: ModelConfig) -> ModelConfig:
    return replace(config, lora_rank=0, lora_alpha=ModelConfig.lora_alpha, lora_dropout=0.0, lora_target=())


def _check_adapters(model: FullModel) -> None:
    if not model.config.lora_rank:
        raise ConfigError("the checkpoint has no adapters: it was trained without --lora-rank")
