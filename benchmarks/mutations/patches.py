"""How a fault is planted: by replacing a function of the project by its name, before the run begins."""

import importlib
from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what ``make`` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))


def module(name: str) -> Any:
    return importlib.import_module(f"megatron.{name}")


def layouts() -> list[Any]:
    """A list that gets the layout of this rank once it is there."""
    found: list[Any] = []
    cls = module("parallel.layout").ParallelLayout
    create = cls.create
    cls.create = lambda parallel: found.append(create(parallel)) or found[-1]
    return found
