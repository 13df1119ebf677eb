"""Reading a file that somebody else's program pickled, without letting it run code."""

import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from megatron.errors import CheckpointError

_SHELVED = ("megatron.", "deepspeed.", "apex.", "numpy.")
"""Programs whose objects lie beside the weights: enumerations, loss scalers, random states. None of them is wanted."""


class Inert:
    """Stands in a file's place for an object of one of ``_SHELVED``: takes whatever it is given, and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def read_foreign(path: Path) -> dict[str, Any]:
    """What ``path`` holds, on the CPU, with ``Inert`` where it holds objects of other programs.

    Raises CheckpointError where it is missing or not whole, and where it asks for anything else than
    tensors, plain values, arguments, and objects that can be stood in for.
    """
    try:
        asked = _globals(path)
        stand_ins = [(Inert, name) for name in asked if name.startswith(_SHELVED)]
        with torch.serialization.safe_globals([Namespace, *stand_ins]):
            value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch has many names for a file that is not whole
        raise CheckpointError(f"{path} cannot be read ({str(error).splitlines()[0]})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, and should hold a dictionary")
    return value


def _globals(path: Path) -> list[str]:
    """What the file asks for beside what is always safe; all else than what ``_SHELVED`` names is refused."""
    if not zipfile.is_zipfile(
        path
    ):  # of the time before torch 1.6: nobody can tell beforehand; torch refuses on the way
        return []
    asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    strange = sorted(name for name in asked if name != "argparse.Namespace" and not name.startswith(_SHELVED))
    if strange:
        raise ValueError(f"it asks for {strange[0]}, which could run code")
    return asked
