"""Weights and optimizer state of one model-parallel rank, by parameter, whatever ZeRO stage saved them.

A *state* is what a rank has of one parameter: ``fp32``, the weight itself, the optimizer's moments under
their own names (``exp_avg``, ``exp_avg_sq``), all of one shape, and ``step``, a number.

DeepSpeed keeps states in *blocks*: a flat tensor in fp32 that the optimizer steps on, flat moments of that
length, and the parameters in it. Without ZeRO a block is a parameter or a group of them; with ZeRO 1 and 2 a
group, of which each data-parallel rank has a part; with ZeRO 3 a rank's parts of each parameter of a
group, one behind the other, padded at the end.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.tensor_files import read_file
from megatron.config.errors import CheckpointError

State = dict[str, Any]
WEIGHT = "fp32"


class Run(NamedTuple):
    """Where a block holds a part of a parameter."""

    name: str
    start: int
    length: int


class Block(NamedTuple):
    """A flat fp32 tensor, the optimizer's state of it, and the parameters in it."""

    weights: Tensor
    state: Mapping[str, Any]
    runs: Iterable[Run]


def has_partitions(layout: Mapping[str, Any]) -> bool:
    """Whether the optimizer's state is in files of their own, one for each data-parallel rank."""
    # In bf16 the pipeline engine partitions at ZeRO 0, too.
    return layout["--zero-stage"] > 0 or (layout["precision"] == "bf16" and layout["--pipe-parallel-size"] > 0)


def data_ranks(layout: Mapping[str, Any]) -> int:
    """Ranks that ZeRO cuts over."""
    return layout["data-parallel size"] * layout["--ds-sequence-parallel-size"]


def model_file(folder: Path, layout: Mapping[str, Any], mp_rank: int) -> Path:
    """DeepSpeed's file about model-parallel rank ``mp_rank`` = stage x tensor-parallel size + tensor rank."""
    prefix = "zero_pp_rank_0_" if layout["--zero-stage"] == 3 else ""
    return folder / f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt"


def rank_states(
    folder: Path, layout: Mapping[str, Any], mp_rank: int, weights: Mapping[str, Tensor] | None = None
) -> dict[str, State]:
    """The state of each parameter that model-parallel rank ``mp_rank`` holds.

    Args:
        folder: of the tag.
        layout: what its ``run.json`` says of the layout.
        weights: of this tensor-parallel rank; needed in fp32 at ZeRO 0, where the optimizer has no others.

    Raises:
        CheckpointError: a file is missing or not whole, or lacks a part.
    """
    model = read_file(model_file(folder, layout, mp_rank))
    if not model.get("param_shapes"):
        raise CheckpointError(f"{folder} does not say which parameters its optimizer has: resume on the layout it has")
    shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
    if layout["--zero-stage"] == 3:
        blocks = _zero3_blocks(_shards(folder, layout, mp_rank), model["param_shapes"], data_ranks(layout))
    elif has_partitions(layout):
        blocks = _partition_blocks(_shards(folder, layout, mp_rank), model["param_shapes"])
    else:
        blocks = _group_blocks(model["optimizer"], model["param_shapes"], weights or {})
    return _assemble(blocks, shapes, folder)


def _shards(folder: Path, layout: Mapping[str, Any], mp_rank: int) -> Iterator[dict[str, Any]]:
    """What each data-parallel rank saved of the optimizer, in order."""
    prefix = "bf16_" if layout["precision"] == "bf16" else ""
    for rank in range(data_ranks(layout)):
        file = folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_{mp_rank:02d}_optim_states.pt"
        yield read_file(file)["optimizer_state_dict"]


def _zero3_blocks(
    shards: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, torch.Size]], ranks: int
) -> Iterator[Block]:
    for shard in shards:
        base = shard["optimizer_state_dict"]
        for number, (weights, shapes) in enumerate(zip(shard["fp32_flat_groups"], groups, strict=True)):
            lengths = {name: math.ceil(shape.numel() / ranks) for name, shape in shapes.items()}
            yield Block(weights, _state(base, number), _one_behind_the_other(lengths))


def _partition_blocks(
    shards: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, torch.Size]]
) -> Iterator[Block]:
    """A block for each group, brought together from all data-parallel ranks.

    Their files say what of which parameter each has (``param_slice_mappings``), but with round-robin
    gradients in an order that is not that of the tensors. That of ``groups`` is.
    """
    shards = list(shards)
    for number, shapes in enumerate(groups):
        weights = torch.cat([shard["single_partition_of_fp32_groups"][number] for shard in shards])
        states = [_state(shard["base_optimizer_state"], number) for shard in shards]
        state = {
            key: torch.cat([state[key] for state in states]) if _is_flat(value) else value
            for key, value in states[0].items()
        }
        lengths = {name: shape.numel() for name, shape in shapes.items()}
        gaps = shards[0]["param_alignment_paddings"][number] if "param_alignment_paddings" in shards[0] else None
        yield Block(weights, state, _one_behind_the_other(lengths, gaps))


def _group_blocks(
    optimizer: Mapping[str, Any], groups: Iterable[Mapping[str, torch.Size]], weights: Mapping[str, Tensor]
) -> Iterator[Block]:
    """Without ZeRO: a block for each parameter, or, where DeepSpeed's fused wrapper made it flat, for each group."""
    base = optimizer.get("optimizer_state_dict", optimizer)  # in half precision there is a wrapper around it
    number = 0
    for index, shapes in enumerate(groups):
        lengths = {name: shape.numel() for name, shape in shapes.items()}
        if "fp32_groups_flat" in optimizer:
            yield Block(optimizer["fp32_groups_flat"][index], _state(base, index), _one_behind_the_other(lengths))
            continue
        masters = optimizer["fp32_groups"][index] if "fp32_groups" in optimizer else [weights[n] for n in lengths]
        for (name, length), master in zip(lengths.items(), masters, strict=True):
            yield Block(master, _state(base, number), [Run(name, 0, length)])
            number += 1


def _one_behind_the_other(lengths: Mapping[str, int], gaps: Sequence[int] | None = None) -> Iterator[Run]:
    """Runs in order, each with as many elements of padding behind it as ``gaps`` says."""
    start = 0
    for (name, length), gap in zip(lengths.items(), gaps or repeat(0), strict=False):
        yield Run(name, start, length)
        start += length + gap


def _state(base: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What the optimizer ``base`` keeps of its tensor ``number``, with the step count that some keep of a group."""
    group = next(group for group in base["param_groups"] if number in group["params"])
    step = {"step": group["step"]} if "step" in group else {}
    return {**step, **base["state"].get(number, {})}


def _assemble(blocks: Iterable[Block], shapes: Mapping[str, torch.Size], folder: Path) -> dict[str, State]:
    """Bring the parts of each parameter together, in the order of the blocks."""
    parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    numbers: dict[str, State] = defaultdict(dict)
    for block in blocks:
        values = {WEIGHT: block.weights, **block.state}
        tensors = {key: value.detach().flatten() for key, value in values.items() if _is_flat(value)}
        for name, start, length in block.runs:
            for key, tensor in tensors.items():
                parts[name][key].append(tensor[start : start + length])
            numbers[name] |= {key: value for key, value in values.items() if not _is_flat(value)}
    return {name: numbers[name] | _whole(name, parts[name], shape, folder) for name, shape in shapes.items()}


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _whole(name: str, parts: Mapping[str, list[Tensor]], shape: torch.Size, folder: Path) -> dict[str, Tensor]:
    whole = {key: torch.cat(pieces)[: shape.numel()].float() for key, pieces in parts.items()}
    if WEIGHT not in whole or any(tensor.numel() < shape.numel() for tensor in whole.values()):
        raise CheckpointError(f"{folder} holds a part of {name} alone: save the checkpoint once more")
    return {key: tensor.view(shape) for key, tensor in whole.items()}
