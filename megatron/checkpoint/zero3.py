"""The weights of a ZeRO-3 checkpoint, which lie in pieces in the optimizer's files, in fp32.

Each data-parallel rank has an equal piece of each weight, padded at the end, one behind the other in the
order of the optimizer's groups.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron.checkpoint.files import read_file
from megatron.errors import CheckpointError


def zero3_weights(folder: Path, *, tensor_rank: int, data_size: int) -> dict[str, Tensor]:
    """The weights of one tensor-parallel rank. Raises CheckpointError where a piece is missing."""
    shapes: dict[str, torch.Size] = {}
    for group in read_file(zero3_file(folder, 0, tensor_rank, "model"))["param_shapes"]:
        shapes |= group
    flat = [_flat(zero3_file(folder, rank, tensor_rank, "optim")) for rank in range(data_size)]  # each [all pieces]
    return dict(_whole(shapes, flat))


def zero3_file(folder: Path, data_rank: int, tensor_rank: int, kind: str) -> Path:
    """Where a rank's ``model`` states lie, or its ``optim`` states."""
    file = folder / f"zero_pp_rank_{data_rank}_mp_rank_{tensor_rank:02d}_{kind}_states.pt"
    of_bf16 = file.with_name(f"bf16_{file.name}")  # so DeepSpeed calls the optimizer's, where weights are bf16
    return of_bf16 if of_bf16.exists() else file


def _flat(file: Path) -> Tensor:
    return torch.cat([group.flatten() for group in read_file(file)["optimizer_state_dict"]["fp32_flat_groups"]])


def _whole(shapes: dict[str, torch.Size], flat: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    start = 0
    for name, shape in shapes.items():
        end = start + math.ceil(shape.numel() / len(flat))
        if end > flat[0].numel():
            raise CheckpointError(f"the optimizer's files end before {name}: save the checkpoint once more")
        yield name, torch.cat([rank[start:end] for rank in flat])[: shape.numel()].view(shape)
        start = end
