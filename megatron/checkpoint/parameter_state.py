"""Weights and optimizer state in the files of a checkpoint, by parameter, regardless of the layout and ZeRO stage.

The *state* of a parameter: ``fp32``, the weight itself, and the optimizer's moments under their own names
(``exp_avg``, ``exp_avg_sq``), all of one shape, and ``step``, a number.

DeepSpeed's files contain states in *blocks*: a flat fp32 tensor that the optimizer updates, flat moments of the same
length, and the parameters in it. Without ZeRO a block is a parameter or a group of them. At ZeRO 1 and 2 it is a
group, partitioned over the data-parallel ranks. At ZeRO 3 it is a rank's part of each parameter of a group, one after
the other, padded at the end.

With expert parallelism, an optimizer's group of experts is partitioned over the ranks that hold the same experts. What
else DeepSpeed's files contain of experts is that of the first rank of each expert group. The other ranks have files of
their own, with the experts that DeepSpeed does not save:

    TAG/expert_rank_EE_mp_rank_RR_states.pt    {name: state} of the experts of rank EE of the group, from 1 on

RR is the model-parallel rank, stage x tensor-parallel size + tensor rank.

Weights that are frozen beside adapters have no state. They are with the other weights in DeepSpeed's files; at ZeRO 3
as parts of their own.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.checkpoint.run_file import SavedLayout, SavedRun
from megatron.checkpoint.tensor_files import read_file
from megatron.common.errors import CheckpointError
from megatron.config import RunConfig
from megatron.engines.state import parameter_states
from megatron.model.architectures import architecture_of
from megatron.model.spec import parameter_prefix
from megatron.parallel import coordinates
from megatron.parallel.expert import expert_group_of

State = dict[str, Any]
"""The state of a parameter by name: its weight, and the optimizer's moments and step count."""
WEIGHT = "fp32"
"""Name of the weight."""
_OF_MATRICES = ("row_var", "col_var")
"""Adafactor's sums over the rows and columns of a matrix, which no other layout can take over."""
Shapes = Mapping[str, torch.Size]
"""Names and shapes of the parameters of an optimizer's group, in its order."""


def rank_weights(saved: SavedRun, tensor_rank: int) -> dict[str, Tensor]:
    """The weights of one tensor-parallel rank, from all stages, under their names without a pipeline."""
    weights, layout = _first_weights(saved, tensor_rank), saved.layout
    if layout.expert_parallel_size > 1:
        for stage in range(max(layout.pipe_parallel_size, 1)):
            others = read_others(saved, stage * layout.model_parallel_size + tensor_rank)
            for name in others[0]:
                weights[name] = torch.cat([weights[name], *(other[name][WEIGHT] for other in others)])
    return weights


def _first_weights(saved: SavedRun, tensor_rank: int) -> dict[str, Tensor]:
    """The same, but only with the experts of the first rank of the expert group."""
    if saved.layout.zero_stage == 3:
        trained = {name: state[WEIGHT] for name, state in rank_states(saved, tensor_rank).items()}
        return trained | _frozen_at_zero3(saved, tensor_rank)
    if saved.layout.pipe_parallel_size == 0:
        return read_file(saved.path / f"mp_rank_{tensor_rank:02d}_model_states.pt", mapped=True)["module"]
    config = saved.whole_model_config()
    layers = architecture_of(config).layers(config)
    weights: dict[str, Tensor] = {}
    for file in sorted(saved.path.glob(f"layer_*-model_{tensor_rank:02d}-model_states.pt")):
        index = int(file.name.split("-")[0].removeprefix("layer_"))
        prefix = parameter_prefix(index, layers[index])
        weights |= {prefix + name: tensor for name, tensor in read_file(file, mapped=True).items()}
    return weights


def _frozen_at_zero3(saved: SavedRun, mp_rank: int) -> dict[str, Tensor]:
    """The frozen weights of a model-parallel rank, concatenated from the parts of all data-parallel ranks."""
    layout = saved.layout
    ranks = [read_file(model_file(saved.path, layout, mp_rank, rank), mapped=True) for rank in range(layout.zero_ranks)]
    shapes: Shapes = ranks[0].get("frozen_param_shapes") or {}
    parts = {name: [rank["frozen_param_fragments"][name].flatten() for rank in ranks] for name in shapes}
    return {name: _full(name, {WEIGHT: parts[name]}, shape, saved.path)[WEIGHT] for name, shape in shapes.items()}


class Block(NamedTuple):
    """A flat fp32 tensor, the optimizer's state of it, and the parameters in it."""

    weights: Tensor
    state: Mapping[str, Any]
    spans: Mapping[str, slice]


def model_file(folder: Path, layout: SavedLayout, mp_rank: int, zero_rank: int = 0) -> Path:
    """DeepSpeed's file of model-parallel rank ``mp_rank`` = stage x tensor-parallel size + tensor rank.

    At ZeRO 3 each data-parallel rank has one.
    """
    prefix = f"zero_pp_rank_{zero_rank}_" if layout.zero_stage == 3 else ""
    return folder / f"{prefix}mp_rank_{mp_rank:02d}_model_states.pt"


def optimizer_file(folder: Path, layout: SavedLayout, zero_rank: int, mp_rank: int) -> Path:
    """DeepSpeed's file of the optimizer's partition ``zero_rank`` of model-parallel rank ``mp_rank``."""
    prefix = "bf16_" if layout.precision == "bf16" else ""
    return folder / f"{prefix}zero_pp_rank_{zero_rank}_mp_rank_{mp_rank:02d}_optim_states.pt"


def stage_states(saved: SavedRun) -> Iterator[dict[str, list[State]]]:
    """State of each parameter on each tensor-parallel rank, for one pipeline stage after the other.

    Raises CheckpointError if a file is missing or damaged, or lacks a part.
    """
    layout = saved.layout
    ranks = range(layout.model_parallel_size)
    # In fp32 without ZeRO the optimizer updates the weights themselves, which are in other files.
    needs_weights = not layout.has_optimizer_partitions and layout.precision == "fp32"
    weights = [rank_weights(saved, rank) if needs_weights else None for rank in ranks]
    for stage in range(max(layout.pipe_parallel_size, 1)):
        shards = [rank_states(saved, stage * len(ranks) + rank, weights[rank]) for rank in ranks]
        yield {name: [shard[name] for shard in shards] for name in shards[0]}


def rank_states(saved: SavedRun, mp_rank: int, weights: Mapping[str, Tensor] | None = None) -> dict[str, State]:
    """The state of each parameter of model-parallel rank ``mp_rank``.

    Without ZeRO in fp32 it needs the ``weights`` of that rank: the optimizer has no others. Raises CheckpointError if a
    file is missing or damaged, or lacks a part.
    """
    layout = saved.layout
    model = read_file(model_file(saved.path, layout, mp_rank))
    groups = model.get("param_shapes")
    if not groups:
        raise CheckpointError(
            f"{saved.path} does not record which parameters its optimizer has: resume on the layout that saved it"
        )
    # One partition at a time is in memory at ZeRO 3.
    partitions = (
        read_file(optimizer_file(saved.path, layout, rank, mp_rank))["optimizer_state_dict"]
        for rank in range(layout.zero_ranks)
    )
    shapes = {name: shape for group in groups for name, shape in group.items()}
    if layout.expert_parallel_size > 1 and layout.has_optimizer_partitions:
        return _with_expert_partitions(saved, list(partitions), groups, shapes)
    if layout.zero_stage == 3:
        blocks = _zero3_blocks(partitions, groups, layout.zero_ranks)
    elif layout.has_optimizer_partitions:
        blocks = _zero1_and_2_blocks(list(partitions), groups)
    else:
        blocks = _zero0_blocks(model["optimizer"], groups, weights or {})
    states = _assemble(blocks, shapes, saved.path)
    return _with_experts(states, read_others(saved, mp_rank))


def _with_expert_partitions(
    saved: SavedRun, partitions: Sequence[Mapping[str, Any]], groups: Sequence[Shapes], shapes: Shapes
) -> dict[str, State]:
    """The states at ZeRO 1 and 2, whose ``partitions`` of experts are those of the ranks with the same experts."""
    ranks, experts = saved.layout.expert_parallel_size, expert_names(saved)
    found: list[dict[str, State]] = []
    for rank in range(ranks):
        blocks = [
            block
            for number, group in enumerate(groups)
            if (is_expert := not experts.isdisjoint(group)) or rank == 0
            for block in _zero1_and_2_blocks(partitions[rank::ranks] if is_expert else partitions, {number: group})
        ]
        names = {name for block in blocks for name in block.spans}
        found.append(_assemble(blocks, {name: shapes[name] for name in shapes if name in names}, saved.path))
    return _with_experts(found[0], found[1:])


def _with_experts(states: dict[str, State], others: Sequence[Mapping[str, State]]) -> dict[str, State]:
    """``states`` with those of the experts of the ``others`` of an expert group appended, in the order of the ranks."""
    for name in others[0] if others else ():
        parts = [states[name], *(other[name] for other in others)]
        states[name] = {
            key: torch.cat([part[key] for part in parts]) if is_flat(value) else value
            for key, value in states[name].items()
        }
    return states


def _zero3_blocks(partitions: Iterable[Mapping[str, Any]], groups: Iterable[Shapes], ranks: int) -> Iterator[Block]:
    for partition in partitions:
        base = partition["optimizer_state_dict"]
        for number, (weights, shapes) in enumerate(zip(partition["fp32_flat_groups"], groups, strict=True)):
            lengths = {name: math.ceil(shape.numel() / ranks) for name, shape in shapes.items()}
            yield Block(weights, numbered_state(base, number), _consecutive_spans(lengths))


def _zero1_and_2_blocks(
    partitions: Sequence[Mapping[str, Any]], groups: Sequence[Shapes] | Mapping[int, Shapes]
) -> Iterator[Block]:
    """A block for each group, or for some by their numbers, concatenated from the ranks that hold it.

    The files state which parameters a rank has (``param_slice_mappings``), but with round-robin gradients in an order
    that is not that of the tensors. That of ``groups`` is.
    """
    for number, shapes in groups.items() if isinstance(groups, Mapping) else enumerate(groups):
        weights = torch.cat([partition["single_partition_of_fp32_groups"][number] for partition in partitions])
        states = [numbered_state(partition["base_optimizer_state"], number) for partition in partitions]
        state = {
            key: torch.cat([state[key] for state in states]) if is_flat(value) else value
            for key, value in states[0].items()
        }
        lengths = {name: shape.numel() for name, shape in shapes.items()}
        paddings = partitions[0].get("param_alignment_paddings")
        yield Block(weights, state, _consecutive_spans(lengths, paddings and paddings[number]))


def _zero0_blocks(
    optimizer: Mapping[str, Any], groups: Iterable[Shapes], weights: Mapping[str, Tensor]
) -> Iterator[Block]:
    """A block for each parameter or, if DeepSpeed's fused wrapper flattened it, for each group.

    There is a wrapper in half precision, which earlier versions ran at ZeRO 0.
    """
    base = optimizer.get("optimizer_state_dict", optimizer)
    number = 0
    for index, shapes in enumerate(groups):
        lengths = {name: shape.numel() for name, shape in shapes.items()}
        if "fp32_groups_flat" in optimizer:
            yield Block(optimizer["fp32_groups_flat"][index], numbered_state(base, index), _consecutive_spans(lengths))
            continue
        masters = optimizer["fp32_groups"][index] if "fp32_groups" in optimizer else [weights[n] for n in lengths]
        for (name, length), master in zip(lengths.items(), masters, strict=True):
            yield Block(master, numbered_state(base, number), {name: slice(length)})
            number += 1


def _consecutive_spans(lengths: Mapping[str, int], paddings: Sequence[int] | None = None) -> dict[str, slice]:
    """Spans in order, each followed by as many elements of padding as ``paddings`` has for it."""
    spans, start = {}, 0
    for (name, length), padding in zip(lengths.items(), paddings or repeat(0), strict=False):
        spans[name] = slice(start, start + length)
        start += length + padding
    return spans


def numbered_state(base: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The state of tensor ``number`` in the optimizer ``base``, with the step count that some keep for a group."""
    group = next(group for group in base["param_groups"] if number in group["params"])
    step = {"step": group["step"]} if "step" in group else {}
    return {**step, **base["state"].get(number, {})}


def _assemble(blocks: Iterable[Block], shapes: Shapes, folder: Path) -> dict[str, State]:
    """Concatenate the parts of each parameter in the order of the blocks."""
    parts: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    numbers: dict[str, State] = defaultdict(dict)
    for block in blocks:
        values = {WEIGHT: block.weights, **{key: block.state[key] for key in block.state if key not in _OF_MATRICES}}
        tensors = {key: value.detach().flatten() for key, value in values.items() if is_flat(value)}
        for name, span in block.spans.items():
            for key, tensor in tensors.items():
                parts[name][key].append(tensor[span])
            numbers[name] |= {key: value for key, value in values.items() if not is_flat(value)}
    return {name: numbers[name] | _full(name, parts[name], shape, folder) for name, shape in shapes.items()}


def is_flat(value: Any) -> bool:
    """Whether it is a part of an optimizer's state that has an element for each of the weight's, flattened."""
    return isinstance(value, Tensor) and value.dim() > 0


def _full(name: str, parts: Mapping[str, list[Tensor]], shape: torch.Size, folder: Path) -> dict[str, Tensor]:
    full = {key: torch.cat(tensors)[: shape.numel()].float() for key, tensors in parts.items()}
    if WEIGHT not in full or any(tensor.numel() < shape.numel() for tensor in full.values()):
        raise CheckpointError(f"{folder} contains only a part of {name}: save the checkpoint again")
    return {key: tensor.view(shape) for key, tensor in full.items()}


def expert_file(folder: Path, expert_rank: int, mp_rank: int) -> Path:
    """The file of one rank of an expert group."""
    return folder / f"expert_rank_{expert_rank:02d}_mp_rank_{mp_rank:02d}_states.pt"


def own_experts(engine: DeepSpeedEngine, run: RunConfig, folder: Path) -> tuple[Path, dict[str, State]] | None:
    """The file that this rank has to write into ``folder``, and its content; None if there is none.

    Of the ranks that hold the same experts one writes. With ZeRO the optimizer's state is in DeepSpeed's files.
    """
    parallel, coordinate = run.parallel, coordinates(run.parallel, dist.get_rank())
    replica, expert_rank = divmod(coordinate["data"], parallel.expert_model_parallel_size)
    if replica > 0 or expert_rank == 0:
        return None
    has_state = run.zero.zero_stage == 0 and not run.checkpoint.no_save_optim
    states = parameter_states(engine) if has_state else {}
    content = {
        name: {**states.get(name, {}), WEIGHT: parameter.detach()}
        for name, parameter in engine.module.named_parameters()
        if expert_group_of(parameter) is not None
    }
    mp_rank = coordinate["pipe"] * parallel.model_parallel_size + coordinate["tensor"]
    return expert_file(folder, expert_rank, mp_rank), content


def read_others(saved: SavedRun, mp_rank: int) -> list[Mapping[str, State]]:
    """States of the experts of a model-parallel rank, of all ranks of its expert group but the first, in order."""
    ranks = range(1, saved.layout.expert_parallel_size)
    return [read_file(expert_file(saved.path, rank, mp_rank), mapped=True) for rank in ranks]


def expert_names(saved: SavedRun) -> set[str]:
    """Names of the parameters whose first dimension is that of experts."""
    config = saved.whole_model_config()
    return {name for name, spec in architecture_of(config).named_parameters(config).items() if spec.is_expert}
