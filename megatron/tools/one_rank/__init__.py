"""One rank of a run of any size, alone in its process: its program runs unmodified, and no other rank is there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from megatron.launch.environment import free_port


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """While inside, attributes have other values: the owner, name and value of each."""
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(patch.object(owner, name, value))
        yield


def place(world_size: int, rank: int, per_host: int = 8) -> dict[str, str]:
    """The environment variables of ``rank`` of a run with so many ranks on a host, on the first device of this host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(min(per_host, world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # nothing connects
    }
