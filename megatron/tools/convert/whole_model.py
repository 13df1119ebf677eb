"""The weights of a whole model, and the files they are in: safetensors, or the pickles of older Hugging Face models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron.checkpoint.files import check_disk_space
from megatron.checkpoint.tensor_files import read_file
from megatron.config import ModelConfig
from megatron.config.errors import CheckpointError
from megatron.model.architectures import GPT2, architecture_of
from megatron.tools.convert.huggingface_files import read_json
from megatron.tools.convert.inspection import INDEX_SUFFIX, SAFETENSORS, broken, shards_of
from megatron.tools.progress import progress_bar


@dataclass(frozen=True)
class WholeModel:
    """The weights of a model without shards and padding, and its configuration."""

    config: ModelConfig
    """With ``padded_vocab_size`` equal to ``vocab_size``."""
    weights: Mapping[str, Tensor]
    """In the order of the layers."""
    description: Mapping[str, Any] | None = None
    """``run.json`` of the training run, if this suite trained it."""


class GPT2Names(NamedTuple):
    """Names and prefixes of GPT-2's parameters, from its spec."""

    words: str
    """The table of tokens, in full."""
    positions: str
    """The table of positions, in full."""
    blocks: list[str]
    """The prefix of each transformer layer."""
    norm: str
    """The prefix of the final layer norm."""


def gpt2_names(config: ModelConfig) -> GPT2Names:
    """The names in a model of ``config``, a GPT-2."""
    prefixes: dict[str, list[str]] = {}
    for prefix, layer in GPT2.prefixed_layers(config):
        prefixes.setdefault(layer.class_name, []).append(prefix)
    (words,), (positions,) = prefixes["WordEmbedding"], prefixes["PositionEmbedding"]
    return GPT2Names(
        f"{words}word_embeddings.weight",
        f"{positions}position_embeddings.weight",
        prefixes["ParallelTransformerLayer"],
        prefixes["LayerNorm"][0],
    )


_LARGEST = 1 << 24
"""Larger than any size of a model; products of such sizes do not overflow."""


def check_sizes(config: ModelConfig, count: int, source: str) -> None:
    """Raises CheckpointError if ``config`` cannot be that of ``count`` tensors, before memory is allocated for it."""
    sizes = (
        config.num_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.ffn_hidden_size,
        config.max_position_embeddings,
        config.vocab_size,
    )
    if config.num_layers > count or not all(type(size) is int and 0 < size <= _LARGEST for size in sizes):
        raise CheckpointError(f"{source} holds {count} tensors, which cannot be the model of {sizes} that it describes")


def in_order(weights: Mapping[str, Tensor], config: ModelConfig, source: str) -> dict[str, Tensor]:
    """``weights`` in the order of the layers of ``config``.

    Args:
        source: where they come from, for messages.

    Raises:
        CheckpointError: with a line for each of the first weights that are missing, unknown or of another shape.
    """
    expected = architecture_of(config).named_parameters(config)
    problems = [f"{source} holds no weight {name}" for name in expected if name not in weights]
    problems += [f"{source} holds {name}, which the model does not have" for name in weights if name not in expected]
    problems += [
        f"{source}: {name} is {list(weights[name].shape)}, and the model's {list(spec.shape)}"
        for name, spec in expected.items()
        if name in weights and weights[name].shape != spec.shape
    ]
    if problems:
        raise CheckpointError(
            problems[:_SHOWN] + [f"{source}: {len(problems)} such lines in all"] * (len(problems) > _SHOWN)
        )
    return {name: weights[name] for name in expected}


_SHOWN = 4


PICKLED = "pytorch_model.bin"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file, or in the files of a folder.

    Raises CheckpointError if a file or a tensor is missing, or a file is damaged.
    """
    if path.is_file():
        return _read_one(path)
    for name in (SAFETENSORS, PICKLED):
        if (path / name).exists():
            return _read_one(path / name)
        if (path / (name + INDEX_SUFFIX)).exists():
            return _read_indexed(path / (name + INDEX_SUFFIX))
    raise CheckpointError(f"{path}: neither {SAFETENSORS} nor {PICKLED} there, whole or with an index")


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, *, max_shard_size: int, metadata: Mapping[str, str]
) -> list[Path]:
    """Write safetensors files of at most ``max_shard_size`` bytes each, with an index if there are several.

    A larger tensor has its own file. Creates ``folder``. Raises ResourceError if there is not enough disk space.
    """
    folder.mkdir(exist_ok=True)
    check_space_for(tensors, folder)
    shards = split(tensors, max_shard_size)
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {key: name for shard, name in zip(shards, names, strict=True) for key in shard},
        }
        (folder / (SAFETENSORS + INDEX_SUFFIX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for shard, name in progress_bar(zip(shards, names, strict=True), total=len(names), desc="writing"):
        write_file(shard, folder / name, metadata)
    return [folder / name for name in names]


def write_file(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    """Write one safetensors file. Raises ResourceError if there is not enough disk space."""
    check_space_for(tensors, file.parent)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    file.touch()
    mode = file.stat().st_mode
    save_file(contiguous, file, {"format": "pt", **metadata})
    file.chmod(mode)  # the library creates files that only the owner may read


def split(tensors: Mapping[str, Tensor], max_size: int) -> list[dict[str, Tensor]]:
    """The tensors in order, in parts of at most ``max_size`` bytes, or of one tensor that is larger."""
    parts: list[dict[str, Tensor]] = [{}]
    space = max_size
    for name, tensor in tensors.items():
        if parts[-1] and tensor.nbytes > space:
            parts.append({})
            space = max_size
        parts[-1][name] = tensor
        space -= tensor.nbytes
    return parts


def check_space_for(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises ResourceError if the disk of ``folder`` has not enough space for ``tensors``."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    check_disk_space(folder, f"{folder.parent}: the output", size, "name a folder on another disk")


def _read_one(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        tensors = read_file(path)
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            raise CheckpointError(f"{path} contains more than named tensors; give a file of weights only")
        return tensors
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise broken(path, error) from None


def _read_indexed(index: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in progress_bar(shards_of(index), desc="reading"):
        tensors |= _read_one(shard)
    if missing := sorted(read_json(index)["weight_map"].keys() - tensors.keys()):
        raise CheckpointError(f"{index} names {missing[0]}, which no file holds (and {len(missing) - 1} more)")
    return tensors
