"""One rank of a run of any size, alone in its process: its program runs unmodified, and no other rank is there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """While inside, attributes have other values: the owner, name and value of each."""
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(patch.object(owner, name, value))
        yield
