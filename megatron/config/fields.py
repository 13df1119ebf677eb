"""Config fields as command-line flags, and the values a user provides for them."""

from collections.abc import Mapping
from dataclasses import Field, field
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.config.architecture import Architecture


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
    only: Architecture | None = None,
) -> Any:
    """A field with a command-line flag named after it (or ``name``), and the other names it answers to.

    ``switches`` are further names that take no value, each with the value it stands for; ``within``
    is the interval of legal numbers, written as in mathematics: ``"[0, 1)"``, ``"[1, inf)"``; ``only`` is the model
    whose program alone has the flag.
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
        "only": only,
    }
    return field(default=default, metadata={"flag": metadata})


def derived(default: Any) -> Any:
    """A field without a flag."""
    return field(default=default, metadata={})


def flag_name(field: Field) -> str:
    """The canonical flag of a field, such as ``--batch-size``, with hyphens for underscores."""
    return "--" + (field.metadata["flag"]["name"] or field.name).replace("_", "-")


class Provided(NamedTuple):
    """A value that the user provided for a field, as opposed to its default, and the source that messages quote."""

    value: Any
    source: str
    """The flag with its value as typed, such as ``--lr 0.1``, or the JSON key with its value and file."""

    @property
    def words(self) -> list[str]:
        """The command-line arguments that provide the value, if its source is a flag."""
        flag, *rest = self.source.split(" ", 1)
        return [flag, *self.value] if isinstance(self.value, tuple) else [flag, *rest]
