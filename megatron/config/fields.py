"""Config fields with metadata for the command line: flag name, help, valid values, and rules about other flags."""

import re
import sys
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, get_origin

from megatron.common.errors import shown
from megatron.common.reading import type_problem

Relations: TypeAlias = str | tuple[str, ...] | Mapping[str, str]
"""Conditions on other flags, optionally with a reason for each.

A flag requires the conditions in ``needs`` and rejects the conditions in ``excludes``; if a condition in
``ignored_without`` does not hold, the flag has no effect, which is a warning. A condition is the name of a field (it
holds if the value is not the default), a field with values (``zero_stage=2|3``), or several joined with ``or``. A
prefix restricts the condition to some values of the flag itself: ``nvme: zero_stage=3``. Of the conditions in
``needs`` only the first that does not hold is reported.
"""


_DECIMAL = re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


def is_decimal(text: str) -> bool:
    """Whether ``text`` is a number as people write it: ``float`` also reads other digits, and ``_`` between them."""
    return _DECIMAL.fullmatch(text) is not None


_NUMBERS = re.compile(r"[0-9]{1,15}(,[0-9]{1,15})*")


def whole_numbers(text: str) -> list[int]:
    """Parse a list such as ``0,513``. Raises ValueError for anything else, such as other digits than 0 to 9."""
    if not _NUMBERS.fullmatch(text):
        raise ValueError("must be whole numbers, separated by commas")
    return [int(number) for number in text.split(",")]


@dataclass(frozen=True)
class Flag:
    """Command-line metadata of a field."""

    help: str
    name: str | None = None
    """Name of the flag, by default the name of the field."""
    aliases: tuple[str, ...] = ()
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Additional flags without argument, and the value that each one sets."""
    choices: tuple[str, ...] | None = None
    within: str | None = None
    """The interval of valid numbers, such as ``"[0, 1)"``."""
    required: bool = False
    metavar: str | None = None
    models: str = "gpt bert t5 other"
    """The kinds of models whose programs have the flag (see ``ArchitectureSpec.kinds``)."""
    multiple_of: str | tuple[str, ...] = ()
    """Fields that divide the value."""
    needs: Relations = ()
    ignored_without: Relations = ()
    excludes: Relations = ()
    instead_of: tuple[str, ...] = ()
    """Fields whose flags cannot be given together with this one."""


def flag(default: Any, help: str, **description: Any) -> Any:
    """A field with a command-line flag, described as in ``Flag``."""
    return field(default=default, metadata={"flag": Flag(help, **description)})


count = partial(flag, within="[1, inf)")
size = partial(flag, within="[1, 1048576]")
positive = partial(flag, within="(0, inf)")
"""Flags of numbers: of iterations and the like; of sizes and ranks; of anything measured."""
folder = partial(flag, metavar="DIR")
"""A flag of the name of a folder."""


def flag_of(field: Field) -> Flag:
    """The flag of a field that has one."""
    return field.metadata["flag"]


def with_reasons(relations: Relations) -> Mapping[str, str]:
    """Each condition with its reason, which may be empty."""
    if isinstance(relations, Mapping):
        return relations
    return dict.fromkeys((relations,) if isinstance(relations, str) else relations, "")


def derived(default: Any) -> Any:
    """A field without a flag."""
    return field(default=default, metadata={})


def flag_name(field: Field) -> str:
    """The canonical flag of a field, such as ``--batch-size``, with hyphens for underscores."""
    return "--" + (flag_of(field).name or field.name).replace("_", "-")


def negative_flag(field: Field) -> str:
    """The flag that sets the boolean ``field`` to False: a declared switch, or else ``--no-`` and its name."""
    declared = [name for name, value in flag_of(field).switches.items() if value is False]
    return f"--{declared[0] if declared else 'no-' + flag_name(field).removeprefix('--')}"


def has_flag(field: Field, kinds: tuple[str, ...]) -> bool:
    """Whether the program that trains models of these kinds (``ArchitectureSpec.kinds``) has the flag of ``field``."""
    return any(kind in flag_of(field).models.split() for kind in kinds)


def inside(value: float, interval: str) -> bool:
    """Whether ``value`` lies in an interval such as ``"[0, 1)"``; an integer that is no float lies in none."""
    if type(value) is int and abs(value) > sys.float_info.max:
        return False
    low, high = ends(interval)
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below


_MANY = 1000
"""An upper limit of at least this much is a practical one, not part of what the value means."""


def is_above(value: float, interval: str) -> bool:
    """Whether ``value`` exceeds a practical upper limit."""
    _, high = ends(interval)
    return value > high >= _MANY


def interval_as_text(interval: str, value: float) -> str:
    """The interval that ``value`` is outside of, such as ``"[0, 1)"``, as text for messages."""
    low, high = ends(interval)
    if is_above(value, interval):
        return f"{high:,.0f} at most"
    if high >= _MANY:
        return f"{low:g} or more" if interval[0] == "[" else f"more than {low:g}"
    return f"from {low:g} to {high:.0f}" + ("" if interval[-1] == "]" else f", {high:g} excluded")


def ends(interval: str) -> tuple[float, float]:
    """The two numbers of an interval; ``inf`` if it is unbounded."""
    low, high = interval[1:-1].split(",")
    return float(low), float(high)


_INTEGERS = "[-1, 9007199254740992]"
"""The interval of integer fields that declare none."""


def field_problems(
    kind: type, values: Mapping[str, Any], *, ranges: bool = True, names: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """A message for each of ``values`` that is not valid for the field of that name in the dataclass ``kind``.

    Values without a field are ignored; ``ranges`` also checks the intervals and choices of flags. ``names`` has other
    names of fields for messages, such as those in the file that the values are from.
    """
    present = [entry for entry in fields(kind) if entry.name in values]
    problems = {entry.name: _problem(entry, values[entry.name], ranges) for entry in present}
    return [
        f"{names.get(name, name)} is {shown(values[name])}: {problem}" for name, problem in problems.items() if problem
    ]


def _problem(entry: Field, value: Any, ranges: bool) -> str | None:
    if isinstance(value, str) and get_origin(entry.type) is tuple:
        value = [value]  # earlier versions wrote a single value without a list
    if problem := type_problem(entry.type, value):
        return problem
    metadata = vars(flag_of(entry)) if "flag" in entry.metadata else entry.metadata
    interval = metadata.get("within") or (_INTEGERS if type(value) is int else "(-inf, inf)")
    if not ranges or value == entry.default:
        return None
    if (choices := metadata.get("choices")) and isinstance(value, str) and value not in choices:
        return f"choose from {', '.join(choices)}"
    if type(value) in (int, float) and not inside(value, interval):
        return f"must be {interval_as_text(interval, value)}"
    return None
