"""Checks of single values in a checkpoint. Each error is a line: the file, what it holds, and what it should hold."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import dropwhile
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError

from megatron.checkpoint.manifest import gone
from megatron.common.errors import CheckpointError, first_line, is_out_of_memory, limit_advice

Shape = Sequence[int]
_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "sum", "variance", "row_var", "col_var")
"""Moments whose elements are never negative."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
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
        raise
    except (*_FORM, OSError, AssertionError) as error:
        if not place.exists():
            raise gone(place) from error
        if isinstance(error, OSError | DistError) or is_out_of_memory(error) or limit_advice(error):
            raise
        more = f" ({first_line(error)})" if isinstance(error, ValueError | AssertionError) else ""
        form = f"lacks a part, or holds one of another form{more}"
        problem = f"lacks {error.args[0]}" if isinstance(error, KeyError) and error.args else form
        raise CheckpointError(f"{place} {problem}") from error


def value_at(place: object, content: Any, *keys: Any) -> Any:
    """The value at a path of keys in the ``content`` of a file. Raises CheckpointError if there is none."""
    for depth, key in enumerate(keys):
        if not isinstance(content, Mapping | list | tuple):
            raise wrong(place, name_of(keys[:depth]), outline(content), f"a part that holds {key}")
        try:
            content = content[key]
        except (LookupError, TypeError):
            raise CheckpointError(f"{place} lacks {name_of(keys[: depth + 1])}") from None
    return content


def name_of(keys: Sequence[Any]) -> str:
    """A path of keys in messages, such as ``state[0].exp_avg``."""
    inner = list(dropwhile(_CONTAINERS.__contains__, keys)) or keys[-1:] or ["it"]
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner).removeprefix(".")


_CONTAINERS = ("module", "frozen_param_fragments", "optimizer", "optimizer_state_dict", "base_optimizer_state")


def check_tensor(place: object, name: str, found: Any, shape: Shape, dtype: torch.dtype | None = None) -> None:
    """Raise CheckpointError unless ``found`` has this shape and type (default: any float), and is finite."""
    check_outline(place, name, found, shape, dtype)
    check_numbers(place, name, found)


def check_numbers(place: object, name: str, found: Tensor, used_as: torch.dtype = torch.float32) -> None:
    """Raise CheckpointError unless ``found`` is a float tensor that is finite, also after conversion to ``used_as``.

    On the meta device only the type is checked.
    """
    if not found.is_floating_point():
        raise wrong(place, name, outline(found), "a tensor of floating point")
    if found.numel() == 0 or found.is_meta:
        return
    low, high = (bound.item() for bound in torch.aminmax(found))  # one pass, without another tensor
    if not torch.tensor([low, high], dtype=used_as).isfinite().all():
        also = f" in {str(used_as).removeprefix('torch.')}" if isfinite(low) and isfinite(high) else ""
        raise wrong(place, name, f"from {low} to {high}", f"finite{also}")
    if low < 0 and name.rpartition(".")[2] in _SECOND_MOMENTS:
        raise wrong(place, name, f"from {low:g} on", "0 or more")


def check_outline(place: object, name: str, found: Any, shape: Shape, dtype: torch.dtype | None = None) -> None:
    """Raise CheckpointError unless ``found``, a tensor or ``Stored``, has this shape and type (default: any float)."""
    type_found, allowed = getattr(found, "dtype", None), _FLOATS if dtype is None else (dtype,)
    if type_found not in allowed or tuple(found.shape) != tuple(shape):
        expected = type_found if type_found in allowed else dtype or torch.float32
        raise wrong(place, name, outline(found), outline(torch.empty(tuple(shape), dtype=expected, device="meta")))


def outline(value: Any) -> str:
    """Type and shape of a dense tensor, such as ``float32 [4, 2]``, or the type of another value."""
    if not isinstance(getattr(value, "dtype", None), torch.dtype):
        return f"of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def wrong(place: object, name: str, found: str, expected: str) -> CheckpointError:
    """An error for the value ``name`` of the file ``place``."""
    return CheckpointError(f"{place}: {name} is {found}, and should be {expected}")
