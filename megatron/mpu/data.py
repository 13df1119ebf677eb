"""Broadcast of a batch with Megatron-LM's arguments and an implicit group."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.tensor import mappings

from .initialize import get_tensor_model_parallel_group


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype, group: ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Broadcast the tensors named ``keys`` from the first tensor-parallel rank; ``data`` may be None on the others.

    Raises ValueError on the first rank if a tensor has another dtype than ``datatype``.
    """
    return mappings.broadcast_data(keys, data, datatype, group or get_tensor_model_parallel_group())


def _check_data_types(keys: Sequence[str], data: Mapping[str, Tensor], target_dtype: torch.dtype) -> None:
    """Raise AssertionError if a tensor has another dtype."""
    for key in keys:
        assert data[key].dtype == target_dtype, f"{key} has data type {data[key].dtype}, not {target_dtype}"


def _build_key_size_numel_dictionaries(
    keys: Sequence[str], data: Mapping[str, Tensor] | None
) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Shapes and numbers of elements of the first rank's tensors, and the total number, on every rank."""
    group = get_tensor_model_parallel_group()
    sizes = {key: list(data[key].shape) for key in keys} if group.rank() == 0 and data is not None else None
    message = [sizes]
    dist.broadcast_object_list(message, src=dist.get_global_rank(group, 0), group=group)
    key_size = message[0] or {}
    key_numel = {key: prod(size) for key, size in key_size.items()}
    return key_size, key_numel, sum(key_numel.values())
