"""Meeting the other ranks: a store that all of them reach, and a roll call that knows who is missing."""

import os
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from socket import socket

from deepspeed.comm.comm import mpi_discovery
from torch.distributed import TCPStore

from megatron.config.environment import on_one_host
from megatron.config.errors import LaunchError
from megatron.launch.port import hosts_store, listen

_SHOWN = 16
_PATIENCE = 2.0
"""Seconds by which the ranks may be late in giving up."""


def find_rank_by_mpi(environ: MutableMapping[str, str], port: int) -> None:
    """Let DeepSpeed ask MPI for this process's place among the others, and for the address of the first one's host."""
    mpi_discovery(distributed_port=port, verbose=False)
    if on_one_host(environ):
        environ["MASTER_ADDR"] = "127.0.0.1"  # no other host has to find it


def connect(environ: Mapping[str, str], timeout: timedelta, listener: socket | None = None) -> TCPStore:
    """A connection of one's own to the store that the ranks meet at, which the first of them keeps, or torchrun.

    It answers whatever the process groups do. ``listener`` is the keeper's, for its first connection.
    """
    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=hosts_store(environ),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener and listener.detach(),
    )


def rendezvous_barrier(environ: Mapping[str, str], timeout: timedelta) -> TCPStore:
    """Wait until every rank has answered; the store, which its keeper has to hold until then.

    Raises:
        LaunchError: with the ranks that have not in time; or where this one cannot listen, though the first.
    """
    listener = listen(environ) if hosts_store(environ) else None
    minutes = f"{timeout.total_seconds() / 60:g} minutes (--distributed-timeout-minutes)"
    try:
        store = connect(environ, timeout, listener)
    except RuntimeError as error:
        raise LaunchError(
            f"no answer at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']} within {minutes}: see that rank 0 is "
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
            f"{len(missing)} of {len(keys)} ranks did not arrive within {minutes}: {_some(missing)}; see that they are "
            "started, with the same MASTER_ADDR and MASTER_PORT, or correct WORLD_SIZE"
        ) from error
    return store


def _missing(store: TCPStore, keys: list[str]) -> list[int]:
    """The ranks whose keys are not there."""
    try:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    except RuntimeError as error:
        raise LaunchError("rank 0 timed out waiting for other ranks and reports which") from error


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
