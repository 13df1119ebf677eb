"""Config fields as command-line flags, and the values a user provides for them."""

import math
from collections.abc import Mapping
from dataclasses import Field, field
from types import MappingProxyType
from typing import Any, NamedTuple


def flag(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    switches: Mapping[str, Any] = MappingProxyType({}),
    choices: tuple[str, ...] | None = None,
    within: str | None = None,
    required: bool = False,
    metavar: str | None = None,
    masked_lm: bool | None = None,
    encoder_decoder: str | None = None,
    pretraining: bool = False,
) -> Any:
    """A field with a command-line flag named after it, or ``name``, and ``aliases``.

    ``switches`` are further flags without a value, each with the value it sets; ``within`` is the
    interval of legal numbers in mathematical notation, such as ``"[0, 1)"`` or ``"[1, inf)"``; ``masked_lm``
    restricts the flag to masked (True) or causal (False) language models, ``pretraining`` to both. Models with an
    encoder and a decoder have the flags of masked ones; ``encoder_decoder`` says that they have this one, too
    ("also"), that no other model has it ("only"), or that they have not ("not").
    """
    metadata = {
        "help": help,
        "name": name,
        "aliases": aliases,
        "switches": switches,
        "choices": choices,
        "within": within,
        "required": required,
        "metavar": metavar,
        "masked_lm": masked_lm,
        "encoder_decoder": encoder_decoder,
        "pretraining": pretraining or masked_lm is not None or encoder_decoder == "only",
    }
    return field(default=default, metadata={"flag": metadata})


def derived(default: Any) -> Any:
    """A field without a flag."""
    return field(default=default, metadata={})


def flag_name(field: Field) -> str:
    """The canonical flag of a field, such as ``--batch-size``, with hyphens for underscores."""
    return "--" + (field.metadata["flag"]["name"] or field.name).replace("_", "-")


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


def inside(value: float, interval: str) -> bool:
    """Whether ``value`` lies in an interval such as ``"[0, 1)"``."""
    low, high = ends(interval)
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


def interval_as_text(interval: str) -> str:
    """An interval such as ``"[0, 1)"`` as text, for messages."""
    low, high = ends(interval)
    if math.isinf(high):
        return f"{low:g} or more" if interval[0] == "[" else f"more than {low:g}"
    return f"from {low:g} to {high:.0f}" + ("" if interval[-1] == "]" else f", {high:g} excluded")


def ends(interval: str) -> tuple[float, float]:
    """The two numbers of an interval; ``inf`` if it is unbounded."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)
