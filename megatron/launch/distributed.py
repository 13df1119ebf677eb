"""Joins the process group: rendezvous that reports missing ranks, device, layout, and an orderly exit."""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from socket import EAI_NONAME, create_connection, getaddrinfo, socket
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.distributed import Store, TCPStore

from megatron.common.environment import check_place, on_one_host, rank, world_size
from megatron.common.errors import ConfigError, LaunchError, counted, first_line
from megatron.common.screen import buffered_stderr
from megatron.config import ParallelConfig
from megatron.engines import (
    deepspeed_silenced,
    discover_mpi_ranks,
    nothing_compiled_for_collectives,
    set_groups_of_deepspeed,
    silence_known_warnings,
)
from megatron.launch.environment import LISTEN, free_port, hosts_store, listen, prepare_nccl
from megatron.launch.rank import explanation, print_warning
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.process_groups import new_group

_BACKEND_ERROR = re.compile("gloo|nccl|makeDeviceFor", re.IGNORECASE)
"""Matches error messages of gloo and NCCL."""
_INTERFACE_ERROR = re.compile("device|interface|address|hostname|socket", re.IGNORECASE)
"""Matches error messages of gloo and NCCL about the network interface."""
_SHOWN = 16
_SKEW_SECONDS = 2.0
"""Maximum seconds between the time-outs of two ranks."""
_PAUSE_SECONDS = 0.2
_NAME_SECONDS = 60
"""Time for the name of rank 0's host to become known."""
_EXIT_TIMEOUT = timedelta(seconds=60)
"""Time for the slowest rank to destroy its process groups, once all ranks have reached the end."""


@contextmanager
def distributed(
    parallel: ParallelConfig, *, same: Mapping[str, Any] | None = None, verbose: bool = False
) -> Iterator[ParallelLayout]:
    """Join the process group on entry and destroy it on exit, unless this process has joined one already.

    Without ``destroy_process_group`` gloo sometimes aborts at the end of the process. ``same`` has what must be the
    same on all ranks, by the names for messages.

    Raises ConfigError if the environment does not set this process's rank, it or MPI has another number of ranks than
    ``parallel``, or a value of ``same`` differs from rank 0; LaunchError as ``rendezvous_barrier`` does.
    """
    _check_ranks(parallel)
    silence_known_warnings()
    joins = not dist.is_initialized()
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    if "RANK" not in os.environ:  # mpirun sets neither a rank nor a port; two runs on a host need different ports
        discover_mpi_ranks(int(os.environ.get("MASTER_PORT", "29500")))
        if on_one_host(os.environ):
            os.environ["MASTER_ADDR"] = "127.0.0.1"  # no other host connects
        if world_size(os.environ) != parallel.world_size:
            raise ConfigError(
                f"the launcher started {parallel.world_size} processes, and mpi4py finds {world_size(os.environ)}: "
                "start with the mpirun of the MPI that mpi4py uses"
            )
    store = rendezvous_barrier(os.environ, timeout) if joins else None
    if store is not None:
        _compare(same or {}, store, os.environ)
    backend = parallel.distributed_backend or _default_backend()
    if backend == "nccl":
        prepare_nccl(os.environ, parallel)
    nothing_compiled_for_collectives()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # before anything can begin to use the first GPU
    with deepspeed_silenced(verbose):
        with _backend_errors(backend):
            deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=verbose)
        set_groups_of_deepspeed(partial(new_group, timeout=timeout))
        layout = ParallelLayout.create(parallel)
    yield layout
    if store is not None:
        dist.destroy_process_group()
        leave_store(store, os.environ)


@contextmanager
def _backend_errors(backend: str) -> Iterator[None]:
    """Turn errors of gloo and NCCL, which cannot form a process group in the block, into LaunchError."""
    try:
        yield
    except RuntimeError as error:
        if explanation(error) or not (isinstance(error, dist.DistError) or _BACKEND_ERROR.search(str(error))):
            raise
        advice = f"; check {backend.upper()}_SOCKET_IFNAME and other environment variables of {backend}"
        raise LaunchError(
            f"the process group of {backend} cannot form ({first_line(error)})"
            f"{advice if _INTERFACE_ERROR.search(str(error)) else ''}"
        ) from error


def _default_backend() -> str:
    accelerator = get_accelerator()
    # On CPU DeepSpeed returns ccl, which it then replaces by gloo with a warning.
    return "gloo" if accelerator.device_name() == "cpu" else accelerator.communication_backend_name()


def _check_ranks(parallel: ParallelConfig) -> None:
    """Raise ConfigError unless the environment sets the rank of this process and the world size of ``parallel``."""
    check_place(os.environ)
    if rank(os.environ) is None:
        raise ConfigError(
            "the environment does not set the rank of this process (RANK): start it with torchrun, deepspeed or "
            "mpirun; or, for a single process, call megatron.launch.environment.prepare_environment(os.environ) first"
        )
    if world_size(os.environ) != parallel.world_size or parallel.world_size % parallel.replica_size:
        raise ConfigError(
            f"the launcher started {counted(world_size(os.environ), 'process')}, and the layout is for "
            f"{parallel.world_size}, in replicas of {parallel.replica_size}: start a multiple of "
            f"{parallel.replica_size}, and pass their number as world_size"
        )


def connect(environ: Mapping[str, str], timeout: timedelta, listener: socket | None = None) -> Store:
    """A new connection to the rendezvous store, which is hosted by rank 0.

    It also works while process groups hang. ``listener`` is the listening socket for rank 0's first connection.
    """
    return TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=hosts_store(environ),
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


_PORT = "port of the store of rank 0"
"""Key of torchrun's store."""


def leave_agent_store(environ: MutableMapping[str, str], timeout: timedelta) -> socket | None:
    """Let rank 0 host the store in place of torchrun, whose store keeps what an earlier attempt has left there.

    Its hosts count attempts differently, so that no prefix tells them apart; but what listened for an earlier one has
    ended. Sets MASTER_PORT. Returns rank 0's listening socket. Raises RuntimeError if rank 0 does not come in time.
    """
    agent = connect(environ, timeout)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    if rank(environ) == 0:
        environ["MASTER_PORT"] = str(free_port())
        try:
            listener = listen(environ)
        except LaunchError:  # torchrun itself listens on all interfaces
            listener = listen({**environ, LISTEN: "0.0.0.0"})
        agent.set(_PORT, environ["MASTER_PORT"])
        return listener
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        environ["MASTER_PORT"] = agent.get(_PORT).decode()
        with suppress(OSError):
            create_connection((environ["MASTER_ADDR"], int(environ["MASTER_PORT"])), timeout=1).close()
            return None
        time.sleep(_PAUSE_SECONDS)
    raise RuntimeError("the store of rank 0 does not answer")


def _wait_for_name(name: str) -> None:
    """Wait up to a minute for an unknown host name: clusters such as Kubernetes publish it when the host has started.

    Raises LaunchError if it is still unknown. Other problems of resolving it are only printed.
    """
    for second in range(_NAME_SECONDS + 1):
        try:
            getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: no name can be so
            reason = f"MASTER_ADDR {name} does not resolve ({first_line(error)})"
            if isinstance(error, UnicodeError) or second == _NAME_SECONDS:
                raise LaunchError(f"{reason}: set it to the name or address of the host of rank 0") from error
            if second == 0:
                print_warning(f"{reason}; waiting for it")
            if error.errno != EAI_NONAME:
                return
        time.sleep(1)


def rendezvous_barrier(environ: MutableMapping[str, str], timeout: timedelta) -> Store:
    """Wait until every rank has arrived. Returns the store, which its host must keep until the others have exited.

    Under torchrun it sets MASTER_PORT, see ``leave_agent_store``. Raises LaunchError with the ranks that did not arrive
    in time, or if rank 0 cannot listen, see ``listen``.
    """
    listener = listen(environ) if hosts_store(environ) else None
    _wait_for_name(environ["MASTER_ADDR"])
    given = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    minutes = f"{timeout.total_seconds() / 60:g} minutes (--distributed-timeout-minutes)"
    try:
        with buffered_stderr():  # torch prints pages of C++ stack frames about a time-out
            if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                listener = leave_agent_store(environ, timeout)
            store = connect(environ, timeout, listener)
    except RuntimeError as error:
        raise _without_rank_0(
            f"no answer at {given} within {minutes}: check that rank 0 is started, that MASTER_ADDR is its host, and "
            "that no firewall is between",
            environ,
        ) from error
    keys = _rank_keys(environ, "arrived")
    store.set(f"arrived/{environ['RANK']}", "")
    # Keys include WORLD_SIZE: ranks that were started with different sizes do not wait for each other.
    all_arrived = f"arrived/all/{len(keys)}"
    if store.add(f"arrivals/{len(keys)}", 1) == len(keys):
        store.set(all_arrived, "")  # all wait for one key: waiting for all keys needs ranks squared look-ups
    try:
        store.wait([all_arrived], timeout)
    except RuntimeError as error:
        raise _incomplete(store, keys, minutes, environ) from error
    return store


def _incomplete(store: Store, keys: Sequence[str], minutes: str, environ: Mapping[str, str]) -> LaunchError:
    """The error that ranks did not arrive within ``minutes``: which ones, or why not."""
    try:
        missing = _missing(store, keys)
    except RuntimeError:
        return _without_rank_0(
            "lost rank 0 before all ranks had connected: it printed why, unless it was killed", environ
        )
    if not missing:
        return LaunchError(
            f"all {len(keys)} ranks connected, and not all were started with WORLD_SIZE={len(keys)}: start each of "
            "them with the same number"
        )
    time.sleep(_SKEW_SECONDS)  # keeps the store for ranks that time out a little later
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    return LaunchError(
        f"{len(missing)} of {len(keys)} ranks did not connect within {minutes}: rank{'s' * (len(missing) > 1)} "
        f"{', '.join(missing[:_SHOWN])}{more}; check that they are started, with the same MASTER_ADDR and "
        "MASTER_PORT, or correct WORLD_SIZE"
    )


def _without_rank_0(text: str, environ: Mapping[str, str]) -> LaunchError:
    """An error that rank 1 prints, too: on the host of rank 0 that is the first rank left."""
    error = LaunchError(text)
    error.only_here = rank(environ) == 1
    return error


def _compare(same: Mapping[str, Any], store: Store, environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a value of ``same`` differs from rank 0."""
    own = {name: str(value) for name, value in same.items()}
    if rank(environ) == 0:
        store.set("settings", json.dumps(own))
        return
    first = json.loads(store.get("settings"))
    for name in sorted(own.keys() | first.keys()):
        if own.get(name) != first.get(name):
            error = ConfigError(
                f"{name} is {own.get(name, 'not given')} here, and {first.get(name, 'not given')} on rank 0: start "
                "all ranks with the same arguments and files"
            )
            error.only_here = True
            raise error


def _missing(store: Store, keys: Sequence[str]) -> list[str]:
    """The ranks whose key is not set. The first rank that calls this looks them up for all."""
    result = f"arrived/missing/{len(keys)}"
    if store.add(f"arrived/asks/{len(keys)}", 1) == 1:
        missing = (str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        store.set(result, ",".join(missing))
    return [rank for rank in store.get(result).decode().split(",") if rank]


def leave_store(store: Store, environ: Mapping[str, str], timeout: timedelta = _EXIT_TIMEOUT) -> None:
    """Announce that this rank no longer uses the store; its host waits for all ranks, at most ``timeout``.

    If the host ended earlier, ranks whose threads still wait for a key would lose their connection, and print a page of
    C++ stack frames.
    """
    with suppress(RuntimeError):  # another rank has been ended
        store.set(f"exits/{environ['RANK']}", "")
        if hosts_store(environ):
            store.wait(_rank_keys(environ, "exits"), timeout)


def _rank_keys(environ: Mapping[str, str], name: str) -> list[str]:
    return [f"{name}/{rank}" for rank in range(int(environ["WORLD_SIZE"]))]
