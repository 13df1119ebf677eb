"""Reads and writes the full weights of a model: safetensors, or pickles of older Hugging Face models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.checks import check_numbers
from megatron.checkpoint.files import check_disk_space
from megatron.checkpoint.safetensors_files import INDEX_SUFFIX, SAFETENSORS, contents, files_with
from megatron.checkpoint.tensor_files import LazyTensors, SafetensorsFiles, files_of, no_floats, outlines_of, read_file
from megatron.common.errors import CheckpointError, shown
from megatron.config import ModelConfig
from megatron.model.architectures import architecture_of
from megatron.tools.command_line import progress_bar


@dataclass(frozen=True)
class FullModel:
    """The full weights of a model, without shards and padding, and its configuration."""

    config: ModelConfig
    """The configuration, with ``padded_vocab_size`` equal to ``vocab_size``."""
    weights: Mapping[str, Tensor]
    """The weights in the order of the layers; ``LazyTensors`` reads each one on access."""
    description: Mapping[str, Any] | None = None
    """``run.json`` of the training run, if this suite trained it."""


SIZES = {
    "num_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "ffn_hidden_size": "inside the MLP",
    "max_position_embeddings": "positions",
    "vocab_size": "tokens",
}
"""Fields with the sizes of a model, and their names in reports."""
_LARGEST = 1 << 24
"""Upper bound of the sizes of a model, whose products do not overflow."""


def check_sizes(config: ModelConfig, count: int, source: str) -> None:
    """Raises CheckpointError if ``config`` cannot describe ``count`` tensors, before memory is allocated."""
    sizes = {what: getattr(config, name) for name, what in SIZES.items()}
    if config.num_layers > count or not all(type(size) is int and 0 < size <= _LARGEST for size in sizes.values()):
        described = ", ".join(f"{shown(size)} {what}" for what, size in sizes.items())
        raise CheckpointError(
            f"{source} holds {count} tensors, which cannot be the model that it describes, of {described}"
        )


def without_padding(weights: Mapping[str, Tensor], config: ModelConfig) -> LazyTensors:
    """``weights`` without the rows beyond the vocabulary size of ``config``."""
    specs, outlines = architecture_of(config).named_parameters(config), outlines_of(weights)

    def cut(name: str, tensor: Tensor) -> Tensor:
        is_padded = name in specs and specs[name].is_vocabulary and tensor.dim() and len(tensor) > config.vocab_size
        return tensor[: config.vocab_size] if is_padded else tensor

    cut_outlines = {name: cut(name, outline.to("meta")) for name, outline in outlines.items()}
    return LazyTensors(cut_outlines, lambda name: cut(name, weights[name]), files_of(weights))


def in_layer_order(weights: Mapping[str, Tensor], config: ModelConfig, source: str) -> LazyTensors:
    """``weights`` in the order of the layers of ``config``.

    Args:
        source: where the weights come from, for messages about those whose file is not known.

    Raises:
        CheckpointError: with a line for each of the first few weights that are missing, unknown or of another shape;
            later, when a weight is read, if it is not finite.
    """
    expected = architecture_of(config).named_parameters(config)
    outlines, files = outlines_of(weights), files_of(weights)
    problems = [f"{source} holds no weight {name}" for name in expected if name not in weights]
    problems += [
        f"{files.get(name, source)} holds {name}, which the model does not have"
        for name in weights
        if name not in expected
    ]
    problems += [
        f"{files.get(name, source)}: {name} is {list(outlines[name].shape)}, and the model's {list(spec.shape)}"
        for name, spec in expected.items()
        if name in weights and outlines[name].shape != spec.shape
    ]
    problems += no_floats(weights, expected, source)
    if problems:
        raise CheckpointError(
            problems[:_SHOWN] + [f"{source}: {len(problems)} such lines in all"] * (len(problems) > _SHOWN)
        )

    def read(name: str) -> Tensor:
        check_numbers(files.get(name, source), name, tensor := weights[name])
        return tensor

    return LazyTensors({name: outlines[name] for name in expected}, read)


_SHOWN = 4


PICKLED = "pytorch_model.bin"


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """The tensors in a file, or in the files of a folder, each read on access.

    Raises CheckpointError if a file is missing or damaged.
    """
    if next(iter(files_with(path, SAFETENSORS, PICKLED))).name.endswith(".safetensors"):
        return SafetensorsFiles(path)
    found = contents(path, _read_pickled, PICKLED)
    outlines = {name: tensor.to("meta") for name, (tensor, _) in found.items()}
    return LazyTensors(outlines, lambda name: found[name][0], {name: file for name, (_, file) in found.items()})


def _read_pickled(path: Path) -> dict[str, tuple[Tensor, Path]]:
    """The tensors of a pickled file, mapped into memory, each with the file."""
    tensors = read_file(path)
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise CheckpointError(f"{path} contains more than named tensors; give a file of weights only")
    return {name: (tensor, path) for name, tensor in tensors.items()}


def write_tensors(
    tensors: Mapping[str, Tensor], output: Path, *, max_shard_size: int | None, metadata: Mapping[str, str]
) -> None:
    """Write the safetensors file ``output`` or, with ``max_shard_size``, a folder of files of at most that many bytes.

    The folder is created if it is absent. Several files have an index; a tensor that is larger has its own file. One
    tensor is in memory at a time. Raises ResourceError if there is not enough disk space.
    """
    outlines = outlines_of(tensors)
    check_space_for(outlines, output)
    if max_shard_size is None:
        _write_file(tensors, output, metadata)
        return
    output.mkdir(exist_ok=True)
    shards = _split(outlines, max_shard_size)
    names = [SAFETENSORS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(outline.nbytes for outline in outlines.values())},
            "weight_map": {key: name for shard, name in zip(shards, names, strict=True) for key in shard},
        }
        (output / (SAFETENSORS + INDEX_SUFFIX)).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for shard, name in progress_bar(zip(shards, names, strict=True), total=len(names), desc="writing"):
        _write_file(LazyTensors(shard, tensors.__getitem__), output / name, metadata)


_TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _write_file(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str]) -> None:
    # The safetensors library needs all tensors of a file in memory. Larger types come first, so that all are aligned.
    outlines = dict(sorted(outlines_of(tensors).items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name, outline in outlines.items():
        begin, end = end, end + outline.nbytes
        header[name] = {
            "dtype": _TYPE_NAMES[outline.dtype], "shape": list(outline.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in outlines:
            opened.write(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)


def _split(tensors: Mapping[str, Tensor], max_size: int) -> list[dict[str, Tensor]]:
    """Split the tensors, in order, into parts of at most ``max_size`` bytes, or of one tensor that is larger."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > max_size:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def check_space_for(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises ResourceError if the disk of ``path`` has too little space for ``tensors``; reads none of them."""
    size = sum(tensor.nbytes for tensor in outlines_of(tensors).values())
    check_disk_space(path.parent, f"{path.parent}: the output", size, "name a folder on another disk")
