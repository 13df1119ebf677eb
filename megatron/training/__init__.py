"""The training run: engines, data iterators, loop, metrics and callbacks."""

from pkgutil import resolve_name
from typing import Any


def __getattr__(name: str) -> Any:
    """Import ``pretrain`` lazily, for programs written for Megatron-LM; this project does not import it from here."""
    if name == "pretrain":
        return resolve_name("megatron.classic_program:pretrain")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
