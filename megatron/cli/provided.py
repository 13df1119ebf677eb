"""The values that a user provides: from texts to values, with their sources, and the intervals that they must be in."""

import ast
import math
import re
from collections.abc import Callable
from dataclasses import Field
from typing import Any, NamedTuple, get_args

from megatron.cli.presets import PRESETS
from megatron.common.errors import did_you_mean
from megatron.config.experts import as_runs


class Source(str):
    """A flag with its value as typed, such as ``--lr 0.1``, after the place that it is from, such as file and line."""

    typed: str

    def __new__(cls, typed: str, place: str = "") -> "Source":
        source = super().__new__(cls, f"{place}: {typed}" if place else typed)
        source.typed = typed
        return source


class Provided(NamedTuple):
    """A value that the user provided for a field, as opposed to its default, and the source that messages quote."""

    value: Any
    source: str
    """A ``Source`` or a flag with its value, or the JSON key with its value and file."""

    @property
    def words(self) -> list[str]:
        """The command-line arguments that provide the value, if its source is a flag."""
        flag, *rest = (self.source.typed if isinstance(self.source, Source) else self.source).split(" ", 1)
        return [flag, *map(str, self.value)] if isinstance(self.value, tuple) else [flag, *rest]


def value_type(field: Field) -> Any:
    """The type of a field's value, without None for an optional field."""
    return next((kind for kind in get_args(field.type) if kind is not type(None)), field.type)


def read_value(field: Field | None, text: str | list[str]) -> Any:
    """The value of ``text`` for ``field``, or for a flag that is no field. Raises ValueError if it cannot be parsed."""
    if field is None:
        return _text(str(text))
    if isinstance(text, list):
        return tuple(map(_READERS[value_type(field)], text))
    choices = tuple(PRESETS) if field.name == "model_preset" else field.metadata["flag"]["choices"]
    if choices and text not in choices:
        raise ValueError(did_you_mean(text, choices, otherwise=f"choose from {', '.join(choices)}"))
    reader = _layer_freq if field.name == "moe_layer_freq" else _READERS[value_type(field)]
    return reader(_first_of_window(text) if field.name == "pre_tokens" else text)


def _layer_freq(text: str) -> int | str:
    """The number of ``--moe-layer-freq``, or its list in the form of ``as_runs``."""
    if "[" in text:
        return as_runs(layer_list(text))
    if (number := _whole(text)) < 1:
        raise ValueError("must be 1 or more")
    return number


_MOST_LAYERS = 20_000
_LONGEST_TEXT = 100_000
"""More than the text of a list of the most layers has."""


def layer_list(text: str) -> tuple[int, ...]:
    """The zeros and ones of a list in Python, such as ``([0]+[1])*2``, which is read without being run.

    Raises ValueError if it is no such list, or a longer one than any model.
    """
    if len(text) > _LONGEST_TEXT:
        raise ValueError("is too long")
    try:
        found = _value(ast.parse(text.strip("\"' "), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list) or not found:
        raise ValueError("must be a number from 1 on, or a list of 0 and 1, one for each layer, such as [0]*1+[1]*3")
    return tuple(found)


def _value(node: ast.AST) -> Any:
    """The list or number of an expression. Raises ValueError or TypeError for what is neither."""
    match node:
        case ast.List(elts=elements) if all(isinstance(e, ast.Constant) and e.value in (0, 1) for e in elements):
            found = [int(ast.literal_eval(element)) for element in elements]
        case ast.Constant(value=int(number)) if 0 < number <= _MOST_LAYERS:
            return number
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if math.prod(len(one) if isinstance(one, list) else one for one in (first, second)) > _MOST_LAYERS:
                raise ValueError  # the list would take gigabytes
            found = first * second
        case _:
            raise ValueError
    if isinstance(found, int) or len(found) > _MOST_LAYERS:
        raise ValueError
    return found


def _first_of_window(text: str) -> str:
    """The tokens before each, of Megatron-LM's ``--window-size`` with those before and after: N of N,0 or (N, 0)."""
    is_pair = text.startswith("(") and text.endswith(")") and "," in text
    before, comma, after = (text[1:-1] if is_pair else text).partition(",")
    if comma and after.strip() != "0":
        raise ValueError(f"a causal model sees no token after its own: give {before},0")
    return before


_LARGEST = 2**53
"""Up to here, whole numbers are exact as floats."""
_NUMBER = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
"""Python also reads digits of other scripts, underscores between digits, a leading plus, and spaces."""


def _whole(text: str) -> int:
    number = read_number(text)
    if abs(number) > _LARGEST:
        raise ValueError(f"must be {_LARGEST} at most")
    if number != int(number):
        raise ValueError("must be a whole number")
    # Through float only if there is a point or an exponent: large seeds would lose digits.
    return int(text) if text.removeprefix("-").isdecimal() else int(number)


def read_number(text: str) -> float:
    """The finite number that ``text`` is. Raises ValueError for anything else."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    if not _NUMBER.fullmatch(text):
        raise ValueError("must be a number written with the digits 0 to 9, without _, + and spaces")
    return number


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_READERS: dict[type, Callable[[str], Any]] = {int: _whole, float: read_number, str: _text}
