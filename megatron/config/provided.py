"""What the user said, and where: the values that were given, as opposed to defaults."""

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple

from megatron.config import RunConfig


class Given(NamedTuple):
    """A value for one field, and the user's own words for it: ``--lr 0.1``, or a JSON key with its file."""

    value: Any
    source: str

    @property
    def words(self) -> list[str]:
        """The same as words of a command line, where it was said there."""
        flag, *rest = self.source.split(" ", 1)
        return [flag, *self.value] if isinstance(self.value, tuple) else [flag, *rest]


@cache
def sections() -> dict[str, type]:
    """The parts of a RunConfig that are dataclasses themselves, by name."""
    return {field.name: field.type for field in fields(RunConfig) if is_dataclass(field.type)}  # type: ignore[misc]


@cache
def flag_fields() -> dict[str, Field]:
    """The fields of all sections that have a flag. No two sections share the name of such a field."""
    return {
        field.name: field for section in sections().values() for field in fields(section) if "flag" in field.metadata
    }


def flag_name(field: Field) -> str:
    """The first name of a field's flag, such as ``--batch-size``; a hyphen stands for every underscore."""
    return "--" + (field.metadata["flag"]["name"] or field.name).replace("_", "-")


def merge(flags: Mapping[str, Given], file: Mapping[str, Given]) -> tuple[dict[str, Given], list[str]]:
    """What both sources say together, and a message for each field on which they differ."""
    contradictions = [
        f"{flags[name].source} and {file[name].source} contradict each other: remove one"
        for name in flags
        if name in file and flags[name].value != file[name].value
    ]
    return {**file, **flags}, contradictions
