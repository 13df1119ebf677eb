"""Checks the limits of the host: open files, address space, threads, required file systems, and the loopback."""

import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from megatron.common.environment import local_rank, ranks_on_host
from megatron.common.errors import ResourceError

_FILES, _MOST_FILES = 128, 4096
_ADDRESSES, _DATA = 7 << 28, 3 << 27
_THREADS, _STACK = 24, 1 << 16
"""Threads of a rank, with its processes that read data, and bytes of their stacks while they are tried out."""


def check_host(environ: Mapping[str, str]) -> None:
    """Increase the limit of open files if it is low, and raise ResourceError with a line for each missing resource.

    Without these resources libraries fail later with unclear errors, or hang.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MOST_FILES:
        soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    check_working_folder()
    if problems := list(_low_limits()) or list(_missing(environ)):
        raise ResourceError(problems)


def check_working_folder() -> None:
    """Raise ResourceError if the working folder has been removed: libraries would fail with unclear errors."""
    try:
        os.getcwd()
    except OSError as error:
        raise ResourceError(f"the working folder is gone ({error.strerror}): change to another one") from None


def _low_limits() -> Iterator[str]:
    for limit, name, least, flag in (
        (resource.RLIMIT_NOFILE, "open files", _FILES, "-n"),
        (resource.RLIMIT_AS, "bytes of address space", _ADDRESSES, "-v"),
        (resource.RLIMIT_DATA, "bytes of data", _DATA, "-d"),
        (resource.RLIMIT_FSIZE, "bytes of a file", 1, "-f"),
    ):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY and allowed < least:
            yield f"the limit of {name} is {allowed:,}, and a rank needs {least:,} or more: raise ulimit {flag}"


def _missing(environ: Mapping[str, str]) -> Iterator[str]:
    if problem := missing_proc():
        yield problem
    if sys.platform == "linux" and not os.access("/dev/shm", os.W_OK | os.X_OK):
        yield "/dev/shm is missing or cannot be written; processes share memory there: mount a tmpfs"
    # Of all ranks here, by the first one: a library of another one would abort when it cannot start a thread.
    count = 0 if local_rank(environ) else _THREADS * (ranks_on_host(environ) or 1)
    try:
        try_threads(count)
    except RuntimeError:
        yield f"this host does not allow {count} threads more, {_THREADS} a rank: raise ulimit -u, or the container's"
    if environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1"):
        try:
            connect_to_itself()
        except OSError as error:
            yield f"127.0.0.1 cannot be reached ({error.strerror or error}); ranks connect to it: ip link set lo up"


def missing_proc() -> str | None:
    """A message if Linux has no /proc here; None if it has, and elsewhere."""
    if sys.platform != "linux" or Path("/proc/self").exists():
        return None
    return "/proc is missing, from which libraries read the memory and the devices of this host: mount it"


def try_threads(count: int) -> None:
    """Start and end ``count`` concurrent threads. Raises RuntimeError if that is not allowed."""
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(count)]
    usual = threading.stack_size(_STACK)  # the address space of one process is not that of all ranks
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(usual)
        end.set()
        for thread in filter(threading.Thread.is_alive, threads):
            thread.join()


def connect_to_itself() -> None:
    """Connect to a port of this process. Raises OSError if that fails."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.socket() as client:
            client.settimeout(5)
            client.connect(server.getsockname())
