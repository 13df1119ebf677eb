"""Runs the unmodified training program as a single rank of a run of any size; collectives are faked."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from megatron.launch.environment import free_port


@contextmanager
def patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    """Context in which attributes are patched: (owner, name, value) of each."""
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(patch.object(owner, name, value))
        yield


def rank_environment(world_size: int, rank: int, per_host: int = 8) -> dict[str, str]:
    """The environment variables of ``rank``, with ``per_host`` ranks per host, on the first device of this host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(min(per_host, world_size)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),  # no process connects
    }
