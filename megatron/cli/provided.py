"""Parses the values that a user provides, and keeps their sources for messages."""

import math
from collections.abc import Callable
from dataclasses import Field
from typing import Any, NamedTuple, get_args

from megatron.cli.presets import PRESETS
from megatron.common.errors import did_you_mean
from megatron.config.experts import as_runs, layer_list
from megatron.config.fields import flag_of, is_decimal


class Source(str):
    """A flag and its value as typed, such as ``--lr 0.1``, prefixed with its place, such as file and line."""

    typed: str

    def __new__(cls, typed: str, place: str = "") -> "Source":
        source = super().__new__(cls, f"{place}: {typed}" if place else typed)
        source.typed = typed
        return source


class Provided(NamedTuple):
    """A value that the user provided for a field, as opposed to a default, and its source for messages."""

    value: Any
    source: str
    """A ``Source``, a flag with its value, or a JSON key with its value and file."""

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that provide the value, if its source is a flag."""
        flag, *rest = (self.source.typed if isinstance(self.source, Source) else self.source).split(" ", 1)
        return [flag, *map(str, self.value)] if isinstance(self.value, tuple) else [flag, *rest]


def value_type(field: Field) -> Any:
    """The type of a field's value, without None for an optional field."""
    return next((kind for kind in get_args(field.type) if kind is not type(None)), field.type)


def read_value(field: Field | None, text: str | list[str]) -> Any:
    """Parse ``text`` for ``field``, or for a flag that is not a field (None). Raises ValueError if it is invalid.

    A choice may be written with other capitals, as in other programs.
    """
    if field is None:
        return _text(str(text))
    if isinstance(text, list):
        return tuple(map(_READERS[value_type(field)], text))
    choices = tuple(PRESETS) if field.name == "model_preset" else flag_of(field).choices
    text = next((choice for choice in choices or () if choice.casefold() == text.casefold()), text)
    if choices and text not in choices:
        raise ValueError(did_you_mean(text, choices, otherwise=f"choose from {', '.join(choices)}"))
    reader = _layer_freq if field.name == "moe_layer_freq" else _READERS[value_type(field)]
    return reader(_first_of_window(text) if field.name == "pre_tokens" else text)


def _layer_freq(text: str) -> int | str:
    """Parse ``--moe-layer-freq``: a number, or a list, which is normalized with ``as_runs``."""
    if "[" in text:
        return as_runs(layer_list(text))
    if (number := _integer(text)) < 1:
        raise ValueError("must be 1 or more")
    return number


def _first_of_window(text: str) -> str:
    """N of Megatron-LM's ``--window-size N,0`` or ``(N, 0)``: the tokens before and after each token."""
    is_pair = text.startswith("(") and text.endswith(")") and "," in text
    before, comma, after = (text[1:-1] if is_pair else text).partition(",")
    if comma and after.strip() != "0":
        raise ValueError(f"a causal model attends to no later tokens: give {before},0")
    return before


_LARGEST = 2**53
"""Integers up to this value are exact as floats."""


def _integer(text: str) -> int:
    number = read_number(text)
    if abs(number) > _LARGEST:
        raise ValueError(f"must be {_LARGEST} at most")
    if number != int(number):
        raise ValueError("must be a whole number")
    # Convert via float only if there is a point or an exponent: large seeds would lose digits.
    return int(text) if text.removeprefix("-").isdecimal() else int(number)


def read_number(text: str) -> float:
    """Parse a finite number. Raises ValueError for anything else."""
    try:
        number = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    if not is_decimal(text):
        raise ValueError("must be a number written with the digits 0 to 9, without _, + and spaces")
    return number


def typed_number(kind: type, text: str) -> Any:
    """A number of the type ``kind``, for argparse. Raises ValueError as ``read_number``."""
    read_number(text)
    return kind(text)


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_READERS: dict[type, Callable[[str], Any]] = {int: _integer, float: read_number, str: _text}
