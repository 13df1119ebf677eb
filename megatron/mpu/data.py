"""Broadcast of a batch with Megatron-LM's arguments and an implicit group."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from .initialize import get_tensor_model_parallel_group


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Broadcast the tensors named ``keys`` from the first tensor-parallel rank; ``data`` may be None on the others.

    Shapes are sent first, then all tensors in one message. Raises ValueError on the first rank if a tensor has another
    dtype than ``datatype``.
    """
    group = group or get_tensor_model_parallel_group()
    device = get_accelerator().current_device_name()
    tensors = [data[key] for key in keys] if data is not None and group.rank() == 0 else []
    for key, tensor in zip(keys, tensors, strict=False):
        if tensor.dtype != datatype:
            raise ValueError(f"broadcast_data: {key} is {tensor.dtype}, not {datatype}")
    shapes, sizes, total = _build_key_size_numel_dictionaries(keys, data, group)
    if group.rank() == 0:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
    else:
        flat = torch.empty(total, dtype=datatype, device=device)
    dist.broadcast(flat, src=dist.get_global_rank(group, 0), group=group)
    parts = flat.split([sizes[key] for key in keys])
    return {key: part.view(shapes[key]) for key, part in zip(keys, parts, strict=True)}


def _check_data_types(keys: Sequence[str], data: Mapping[str, Tensor], target_dtype: torch.dtype) -> None:
    """Raise AssertionError if a tensor has another dtype."""
    for key in keys:
        assert data[key].dtype == target_dtype, f"{key} has data type {data[key].dtype}, not {target_dtype}"


def _build_key_size_numel_dictionaries(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, group: ProcessGroup | None = None
) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Shapes and numbers of elements of the first rank's tensors, and the total number, on every rank."""
    group = group or get_tensor_model_parallel_group()
    sizes = {key: list(data[key].shape) for key in keys} if group.rank() == 0 and data is not None else None
    message = [sizes]
    dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
    key_size = message[0] or {}
    key_numel = {key: prod(size) for key, size in key_size.items()}
    return key_size, key_numel, sum(key_numel.values())
