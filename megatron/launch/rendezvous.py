"""Meeting the other ranks: a store that all of them reach, and a roll call that knows who is missing."""

import os
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import TCPStore

from megatron.errors import LaunchError

_SHOWN = 16
_PATIENCE = 2.0
"""Seconds by which the ranks may be late in giving up."""


def connect(environ: Mapping[str, str], timeout: timedelta, *, listener: int | None = None) -> TCPStore:
    """A connection of one's own to the store that the ranks meet at, which the first of them keeps, or torchrun.

    It answers whatever the process groups do. Its keeper makes it listen on the file descriptor ``listener``, or on
    every interface.
    """
    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=_keeps_store(environ),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener,
    )


def call_roll(environ: Mapping[str, str], timeout: timedelta) -> TCPStore:
    """Wait until every rank has answered; the store, which its keeper has to hold until then.

    Raises:
        LaunchError: with the ranks that have not in time.
    """
    minutes = f"{timeout.total_seconds() / 60:g} minutes (--distributed-timeout-minutes)"
    try:
        store = connect(environ, timeout, listener=_own_listener(environ))
    except RuntimeError as error:
        raise LaunchError(
            f"nobody answers at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']} within {minutes}: see that rank 0 is "
            "started, that MASTER_ADDR is its host, and that no firewall is between"
        ) from error
    keys = [f"roll/{rank}" for rank in range(int(environ["WORLD_SIZE"]))]
    store.set(f"roll/{environ['RANK']}", str(os.getpid()))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:
        missing = _missing(store, keys)
        time.sleep(_PATIENCE)  # for those that ask this one, if it keeps the store
        raise LaunchError(
            f"{len(missing)} of {len(keys)} ranks have not come within {minutes}: {_some(missing)}; see that they are "
            "started, with the same MASTER_ADDR and MASTER_PORT, or correct WORLD_SIZE"
        ) from error
    return store


def _keeps_store(environ: Mapping[str, str]) -> bool:
    return environ["RANK"] == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _own_listener(environ: Mapping[str, str]) -> int | None:
    """A socket that other hosts cannot reach, where all ranks meet on this one. The store takes anybody's commands."""
    if not _keeps_store(environ) or environ["MASTER_ADDR"] != "127.0.0.1":
        return None
    return socket.create_server(("127.0.0.1", int(environ["MASTER_PORT"]))).detach()


def _missing(store: TCPStore, keys: list[str]) -> list[int]:
    """The ranks whose keys are not there."""
    try:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as error:
        raise LaunchError("rank 0 has given up waiting for others, and says for which") from error


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
