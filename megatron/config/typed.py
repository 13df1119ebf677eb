"""Values from JSON files, compared with the types, choices and intervals of a dataclass's fields. No torch."""

import json
from collections.abc import Mapping
from dataclasses import Field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, get_origin

from megatron.config.fields import inside, interval_as_text

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_WHOLE = "[-1, 9007199254740992]"
"""Whole numbers of fields without an interval."""
_SHOWN = 60


def field_problems(kind: type, values: Mapping[str, Any], *, ranges: bool = True) -> list[str]:
    """A message for each of ``values`` that the field of its name of the dataclass ``kind`` cannot have.

    Values without a field are ignored; with ``ranges`` numbers must be in the intervals of flags, and choices known.
    """
    found = {entry.name: _problem(entry, values[entry.name], ranges) for entry in fields(kind) if entry.name in values}
    return [f"{name} is {shown(values[name])}: {problem}" for name, problem in found.items() if problem]


def shown(value: Any) -> str:
    """A value for messages, of which a long one is cut off."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def type_problem(kind: Any, value: Any) -> str | None:
    """Why ``value`` of a JSON file is none of the type ``kind``, without any conversion; None if it is."""
    from pydantic import ValidationError

    try:
        _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"[{step!r}]" for step in first["loc"] if step != "constrained-str")
        return f"{where} {first['msg']}".strip()
    return None


@cache
def _adapter(kind: Any) -> "TypeAdapter":
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _problem(entry: Field, value: Any, ranges: bool) -> str | None:
    if isinstance(value, str) and get_origin(entry.type) is tuple:
        value = [value]  # as earlier versions wrote a single one
    if problem := type_problem(entry.type, value):
        return problem
    metadata = entry.metadata.get("flag") or entry.metadata
    interval = metadata.get("within") or (_WHOLE if type(value) is int else "(-inf, inf)")
    if not ranges or value == entry.default:
        return None
    if (choices := metadata.get("choices")) and isinstance(value, str) and value not in choices:
        return f"choose from {', '.join(choices)}"
    if type(value) in (int, float) and not inside(value, interval):
        return f"must be {interval_as_text(interval, value)}"
    return None
