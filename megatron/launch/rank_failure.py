"""Rank failure monitor: a rank that dies ends the run, and one of the others names it.

The kernel reports the end of a rank to the ranks of its host, with the signal if no process has reaped it yet; the
rendezvous store reports it to other hosts. Neither takes part in a collective, and nothing is polled.
"""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron.common.errors import LaunchError
from megatron.common.processes import has_received, pid_namespace
from megatron.launch.distributed import connect
from megatron.launch.progress import ProgressState, recorded_file
from megatron.launch.rank import failure_of_nccl, is_connection_lost, is_timeout, print_error

_FAILURE = "failure"
"""Key of the store: set when a rank has failed, or with ``_FINISHED`` when all have reached the end."""
_FINISHED = b"finished"
_REPORTED = "failure/reported"
"""Key of the store: a rank that fails with an error of its own, and prints it, has set this and its number."""
_LAUNCHER_SECONDS = 2.5
"""Within which every launcher has seen that a process ended, and so before any that ended in consequence."""
_GRACE_SECONDS = 10.0
"""For a rank to notice by itself, in a collective, that another has ended."""
_UNLIMITED = timedelta(days=365)


@contextmanager
def rank_failure_monitor(progress: ProgressState) -> Iterator[None]:
    """Inside the block, exit with code 6 once another rank has ended. Every rank enters, and all exit together.

    Raises:
        LaunchError: in place of the backend's error about a rank that has ended or is late, or of NCCL's own.
    """
    if dist.get_world_size() == 1:
        yield
        return
    monitor = _RankFailureMonitor(progress)
    exit_when_watchdog_fails(lambda: _report_watchdog(progress))
    try:
        yield
        dist.barrier()
        monitor.stop()  # all ranks are at the end; a rank that exits from here on has not failed
        dist.barrier()  # no monitor uses the store any more, so its host may exit
    except Exception as error:
        if is_connection_lost(error):
            monitor.exit_after_failure()
        if is_timeout(error):
            raise LaunchError(
                f"in iteration {progress.iteration} another rank did not respond within --distributed-timeout-minutes; "
                "--watchdog-minutes reports which, and where each rank is"
            ) from error
        if (reason := failure_of_nccl(error)) is not None:
            raise LaunchError(f"in iteration {progress.iteration} {reason}") from error
        with suppress(RuntimeError):
            monitor.store.set(f"{_REPORTED}/{dist.get_rank()}", "")
        raise
    finally:
        monitor.is_over = True


def _report_watchdog(progress: ProgressState) -> None:
    """Print that torch's NCCL watchdog ends this rank. The backend has printed the collective and the cause."""
    file = recorded_file(os.environ, dist.get_rank())
    recorded = f"; the last collectives are in {file}" if file else ""
    where = f"rank {dist.get_rank()}: in iteration {progress.iteration}"
    print_error(f"{where} NCCL failed or a collective timed out, as printed above{recorded}")


class _RankFailureMonitor:
    """Two threads: one waits for ranks of this host to end, the other for the store to report one elsewhere."""

    def __init__(self, progress: ProgressState) -> None:
        self.is_over = False
        self._rank, self._progress = dist.get_rank(), progress
        self._known = threading.Event()
        self.store = connect(os.environ, timedelta(seconds=_GRACE_SECONDS))
        self._waiting_store = connect(os.environ, _UNLIMITED)
        namespace = pid_namespace()
        places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(places, (namespace, os.getpid()))
        self._neighbors = {
            pid: rank for rank, (place, pid) in enumerate(places) if place == namespace and rank != self._rank
        }
        threading.Thread(target=self._watch_host, name="rank failures here", daemon=True).start()
        self._store_thread = threading.Thread(target=self._watch_store, name="rank failures elsewhere", daemon=True)
        self._store_thread.start()

    def stop(self) -> None:
        """End monitoring on all ranks, each of which calls this; returns when this one no longer uses the store."""
        self.is_over = True
        self.store.set(_FAILURE, _FINISHED.decode())
        self._store_thread.join(_GRACE_SECONDS)

    def exit_after_failure(self) -> NoReturn:
        """Exit because of another rank, once it is known which and the launcher has seen it.

        Raises LaunchError: without a message if the cause has been printed.
        """
        if not self._known.wait(_LAUNCHER_SECONDS):  # no rank of this host, which its launcher would have to see first
            raise LaunchError(f"lost a rank of another host in iteration {self._progress.iteration}")
        # The launcher, once it has seen a rank end, ends this one, too, and may have done so before this rank noticed.
        received: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        deadline = time.monotonic() + _LAUNCHER_SECONDS
        while not (received or has_received(before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise LaunchError([])

    def _watch_host(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        poll = select.poll()
        ranks = {}
        for pid, rank in self._neighbors.items():
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                return self._handle_end(rank, _UNKNOWN)
            ranks[file] = rank, pid
            poll.register(file, select.POLLIN)
        if ranks:
            file, _ = poll.poll()[0]
            rank, pid = ranks[file]
            self._handle_end(rank, _cause(pid))

    def _handle_end(self, rank: int, cause: str | None) -> None:
        """Report the end of a rank of this host, unless it prints its error itself, and exit."""
        if self.is_over:
            return
        with suppress(RuntimeError):
            if cause == _UNKNOWN and self.store.check([f"{_REPORTED}/{rank}"]):
                cause = None
        text = f"rank {rank} was killed{cause} in iteration {self._progress.iteration}" if cause is not None else ""
        try:
            is_first = self.store.add(f"{_FAILURE}/monitors", 1) == 1
            self.store.set(_FAILURE, text)
        except RuntimeError:  # the store ended with the rank that hosted it
            is_first = self._rank == min({self._rank, *self._neighbors.values()} - {rank})
        if is_first and text:
            print_error(text)
        self._exit()

    def _watch_store(self) -> None:
        try:
            if self._waiting_store.get(_FAILURE) == _FINISHED:
                return
        except RuntimeError:
            # Its host has ended. The ranks of that host know more.
            time.sleep(1)
            is_first_on_host = self._rank < min(self._neighbors.values(), default=dist.get_world_size())
            if is_first_on_host and not self.is_over and not self._known.is_set():
                print_error(f"rank {self._rank}: lost rank 0 or its host in iteration {self._progress.iteration}")
        self._exit()

    def _exit(self) -> None:
        """Give the training loop time to notice, and end the process if it has not."""
        if self.is_over:
            return
        self._known.set()
        time.sleep(_GRACE_SECONDS)
        if not self.is_over:
            sys.stderr.flush()
            os._exit(LaunchError.exit_code)


_UNKNOWN = ""


def _cause(pid: int) -> str | None:
    """How a process of another parent ended: " by SIGKILL"; _UNKNOWN; None if it exited by itself.

    /proc has the status until the parent has reaped the process. psutil has none of a process that is not a child.
    """
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except OSError:
        return _UNKNOWN
    return f" by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else None


_Terminate = ctypes.CFUNCTYPE(None)
_kept: list[object] = []
"""C++ has only the address of a handler."""


def exit_when_watchdog_fails(report: Callable[[], None]) -> None:
    """When torch's NCCL watchdog ends this process, call ``report`` and exit with code 6 in place of SIGABRT.

    The watchdog is a thread without Python. An exception about a lost rank or a timeout, of the class
    c10::DistBackendError, which nothing catches, makes the C++ runtime call a terminate handler. Any other exception,
    and abort(), end the process as before.
    """
    try:
        runtime = ctypes.CDLL("libstdc++.so.6")
        set_terminate = runtime["_ZSt13set_terminatePFvvE"]
        exception_type = runtime["__cxa_current_exception_type"]
    except (OSError, AttributeError):
        return  # another C++ runtime
    set_terminate.restype = exception_type.restype = ctypes.c_void_p

    @_Terminate
    def handle() -> None:
        address = exception_type()
        # A std::type_info: the address of its virtual functions, then that of the mangled name.
        name = ctypes.c_char_p.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value if address else None
        if b"DistBackendError" in (name or b""):
            report()
            os._exit(LaunchError.exit_code)
        previous()

    set_terminate.argtypes = [_Terminate]
    previous = _Terminate(set_terminate(handle))
    _kept.append(handle)
