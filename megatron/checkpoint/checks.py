"""Checks of single values in a checkpoint. Each error is a line: the file, what it holds, and what it should hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.manifest import gone
from megatron.common.errors import CheckpointError, first_line

Shape = Sequence[int]
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "sum", "variance", "row_var", "col_var")
"""Moments whose elements are never negative."""
_FORM = (LookupError, ArithmeticError, TypeError, AttributeError, ValueError, RuntimeError, StopIteration, EOFError)


@contextmanager
def form_errors(place: Path) -> Iterator[None]:
    """Turn errors in a block that reads ``place`` into CheckpointError if its form is wrong, or it was removed.

    Each line of a CheckpointError names a file or ``place``.
    """
    try:
        yield
    except CheckpointError as error:
        error.messages = [line if str(place) in line else f"{place}: {line}" for line in error.messages]
        error.args = ("\n".join(error.messages),)
        raise
    except (*_FORM, OSError, AssertionError) as error:
        if not place.exists():
            raise gone(place) from error
        if not isinstance(error, _FORM) or "inline_container" in str(error):
            raise  # "inline_container" is in errors of torch's writer about a full disk
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{place} lacks a part, or holds one of another form ({problem})") from error


def check_tensor(place: object, name: str, found: Any, shape: Shape, dtype: torch.dtype | None = None) -> None:
    """Raise CheckpointError unless ``found`` has this shape and type (default: any float), and is finite."""
    check_outline(place, name, found, shape, dtype)
    check_numbers(place, name, found)


def check_numbers(place: object, name: str, found: Tensor) -> None:
    """Raise CheckpointError unless ``found`` is a finite float tensor. On the meta device only the type is checked."""
    if not found.is_floating_point():
        raise wrong(place, name, outline(found), "a tensor of floating point")
    if found.numel() == 0 or found.is_meta:
        return
    low, high = (bound.item() for bound in torch.aminmax(found))  # one pass, without another tensor
    if not (isfinite(low) and isfinite(high)):
        raise wrong(place, name, f"from {low} to {high}", "finite")
    if low < 0 and name.rpartition(".")[2] in _SECOND_MOMENTS:
        raise wrong(place, name, f"from {low:g} on", "0 or more")


def check_outline(place: object, name: str, found: Any, shape: Shape, dtype: torch.dtype | None = None) -> None:
    """Raise CheckpointError unless ``found``, a tensor or ``Stored``, has this shape and type (default: any float)."""
    type_found, shape_found = getattr(found, "dtype", None), getattr(found, "shape", None)
    is_float = isinstance(type_found, torch.dtype) and type_found.is_floating_point
    if (
        shape_found is None
        or tuple(shape_found) != tuple(shape)
        or not (is_float if dtype is None else dtype == type_found)
    ):
        expected = dtype or (type_found if is_float else torch.float32)
        raise wrong(place, name, outline(found), outline(torch.empty(tuple(shape), dtype=expected, device="meta")))


def outline(value: Any) -> str:
    """Type and shape of a dense tensor, such as ``float32 [4, 2]``, or the type of another value."""
    if not isinstance(getattr(value, "dtype", None), torch.dtype):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def wrong(place: object, name: str, found: str, expected: str) -> CheckpointError:
    """An error for the value ``name`` of the file ``place``."""
    return CheckpointError(f"{place}: {name} is {found}, and should be {expected}")
