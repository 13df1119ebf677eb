"""The training run: engines, data iterators, loop, metrics and callbacks."""

from pkgutil import resolve_name
from typing import Any


def __getattr__(name: str) -> Any:
    """``pretrain`` for programs in Megatron-LM's shape; nothing of the suite imports it from here."""
    if name == "pretrain":
        return resolve_name("megatron.classic_program:pretrain")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
