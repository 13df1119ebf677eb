"""Torch operations with data-dependent shapes, and their results for tensors without data."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
SELECTING = frozenset(
    (aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten.index.Tensor)
)  # fmt: skip
"""Operations whose result is empty if no element is selected."""
_UNIQUE = (aten._unique2.default, aten.unique_consecutive.default)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


def has_data_dependent_shape(func: Any, args: tuple) -> bool:
    """Whether the shape of the result depends on data, such as the number of true elements of a mask."""
    if func in _INDEXING:
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return func in SELECTING or func in _UNIQUE


def result_for_all_elements(func: Any, x: Tensor, *others: Any, **options: Any) -> Any:
    """The result of an operation with ``has_data_dependent_shape`` if all elements of ``x`` are selected.

    ``x`` has no data.
    """
    if func in _UNIQUE:
        return x.flatten().clone(), torch.empty_like(x, dtype=torch.long), x.flatten().long()
    if func is aten.nonzero.default:
        return torch.empty(x.numel(), x.dim(), dtype=torch.long, device=x.device)
    if func is aten.bincount.default:
        size = others[1] if len(others) > 1 else options.get("minlength", 0)
        return torch.empty(max(size, 1), dtype=torch.long, device=x.device)
    if func is aten.index.Tensor:
        (mask,) = (index for index in others[0] if index is not None)
        return x.flatten(0, mask.dim() - 1).clone()
    if func is aten.index_put_.default:
        return x
    return x.clone() if func is aten.index_put.default else x.flatten().clone()
