"""Rank failure monitor: ends the run when a rank dies, and reports which one.

The kernel notifies the ranks on the same host of the end of a process, with the signal if the process has not been
reaped yet; the rendezvous store notifies other hosts. Neither uses collectives or polling.
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
"""Key of the store: set when a rank has failed, or to ``_FINISHED`` when all ranks have reached the end."""
_FINISHED = b"finished"
_REPORTED = "failure/reported"
"""Key of the store: a rank that fails, and prints its error itself, sets this key with its rank appended."""
_LAUNCHER_SECONDS = 2.5
"""Seconds within which every launcher notices the end of a process; ranks that end as a consequence wait for it."""
_GRACE_SECONDS = 10.0
"""Seconds for a rank to notice, in a collective, that another rank has ended."""
_UNLIMITED = timedelta(days=365)


@contextmanager
def rank_failure_monitor(progress: ProgressState) -> Iterator[None]:
    """Context in which this process exits with code 6 if another rank ends. Every rank must enter and leave it.

    Raises LaunchError in place of errors of the backend about a lost rank or a timeout, and of other NCCL errors.
    """
    if dist.get_world_size() == 1:
        yield
        return
    monitor = _RankFailureMonitor(progress)
    exit_when_watchdog_fails(lambda: _report_watchdog(progress))
    try:
        yield
        dist.barrier()
        monitor.stop()  # all ranks are at the end; a rank that exits from now on has not failed
        dist.barrier()  # no monitor uses the store any longer, so its host may exit
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
    """Print that torch's NCCL watchdog ends this rank. The backend has already printed the collective and the cause."""
    file = recorded_file(os.environ, dist.get_rank())
    recorded = f"; the last collectives are in {file}" if file else ""
    where = f"rank {dist.get_rank()}: in iteration {progress.iteration}"
    print_error(f"{where} NCCL failed or a collective timed out, as printed above{recorded}")


class _RankFailureMonitor:
    """Two threads: one waits for a rank of this host to end, the other for a failure reported in the store."""

    def __init__(self, progress: ProgressState) -> None:
        self.is_over = False
        self._rank, self._progress = dist.get_rank(), progress
        self._known = threading.Event()
        self.store = connect(os.environ, timedelta(seconds=_GRACE_SECONDS))
        self._waiting_store = connect(os.environ, _UNLIMITED)
        namespace = pid_namespace()
        processes: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(processes, (namespace, os.getpid()))
        self._neighbors = {
            pid: rank for rank, (other, pid) in enumerate(processes) if other == namespace and rank != self._rank
        }
        threading.Thread(target=self._watch_host, name="rank failures here", daemon=True).start()
        self._store_thread = threading.Thread(target=self._watch_store, name="rank failures elsewhere", daemon=True)
        self._store_thread.start()

    def stop(self) -> None:
        """End monitoring; every rank must call it. Returns when this rank's monitor no longer uses the store."""
        self.is_over = True
        self.store.set(_FAILURE, _FINISHED.decode())
        self._store_thread.join(_GRACE_SECONDS)

    def exit_after_failure(self) -> NoReturn:
        """Exit because another rank failed, after the failed rank is known and the launcher has noticed it.

        Raises LaunchError, without a message if the cause has been printed.
        """
        if not self._known.wait(_LAUNCHER_SECONDS):  # not a rank of this host, which the launcher must notice first
            raise LaunchError(f"lost a rank of another host in iteration {self._progress.iteration}")
        # When the launcher notices that a rank has ended, it ends this one, perhaps before this rank has noticed.
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
        """Report the end of a rank of this host, unless that rank prints its error itself, and exit."""
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
            # The host of the store has ended. Ranks on that host report more details.
            time.sleep(1)
            is_first_on_host = self._rank < min(self._neighbors.values(), default=dist.get_world_size())
            if is_first_on_host and not self.is_over and not self._known.is_set():
                print_error(f"rank {self._rank}: lost rank 0 or its host in iteration {self._progress.iteration}")
        self._exit()

    def _exit(self) -> None:
        """Wait for the training loop to notice the failure, and end the process if it does not."""
        if self.is_over:
            return
        self._known.set()
        time.sleep(_GRACE_SECONDS)
        if not self.is_over:
            sys.stderr.flush()
            os._exit(LaunchError.exit_code)


_UNKNOWN = ""


def _cause(pid: int) -> str | None:
    """How a process that is not a child ended: " by SIGKILL" etc., ``_UNKNOWN``, or None if it exited by itself.

    /proc has the status until the parent reaps the process; psutil only has it for children.
    """
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except OSError:
        return _UNKNOWN
    return f" by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else None


_Terminate = ctypes.CFUNCTYPE(None)
_handlers: list[object] = []
"""References to terminate handlers: C++ only stores their addresses."""


def exit_when_watchdog_fails(report: Callable[[], None]) -> None:
    """When torch's NCCL watchdog ends this process, call ``report`` and exit with code 6 instead of SIGABRT.

    The watchdog is a C++ thread. It throws c10::DistBackendError for a lost rank or a timeout; nothing catches it, so
    the C++ runtime calls the terminate handler. Other exceptions, and abort(), end the process as before.
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
        # Layout of std::type_info: the address of the vtable, then the address of the mangled name.
        name = ctypes.c_char_p.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value if address else None
        if b"DistBackendError" in (name or b""):
            report()
            os._exit(LaunchError.exit_code)
        previous()

    set_terminate.argtypes = [_Terminate]
    previous = _Terminate(set_terminate(handle))
    _handlers.append(handle)
