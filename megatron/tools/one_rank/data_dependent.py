"""Operations of torch whose results depend on numbers in their shapes, and what they are where there are no numbers."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
SELECTING = frozenset(
    (aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten.index.Tensor)
)  # fmt: skip
"""Operations whose result is empty if no element counts."""
_UNIQUE = (aten._unique2.default, aten.unique_consecutive.default)
_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


def has_data_dependent_shape(func: Any, args: tuple) -> bool:
    """Whether a shape depends on numbers, such as on how many elements of a mask are true."""
    if func in _INDEXING:
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    return func in SELECTING or func in _UNIQUE


def of_every_element(func: Any, x: Tensor, *others: Any, **options: Any) -> Any:
    """The result of an operation that ``has_data_dependent_shape`` if every element counts; ``x`` has no numbers."""
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
