"""What makes a field of a config a command-line flag."""

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

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
