"""A rank that dies ends the others, and one of them says which it was.

The kernel tells the ranks of a host when one of them ends, and by which signal if nobody has asked before; the store
tells those of other hosts. None of it takes part in a collective, and nothing is asked for in turns.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from megatron.config.errors import LaunchError
from megatron.launch.progress import ProgressState
from megatron.launch.rank import is_connection_lost, print_error
from megatron.launch.rendezvous import connect

_KEY = "death"
_LAUNCHER_LOOKS = 2.5
"""Seconds within which every launcher sees that a process ended, and so before any that ended for want of it."""
_GRACE = 10.0
"""Seconds in which a rank may notice by itself, in a collective, that another is gone."""
_FOR_EVER = timedelta(days=365)


@contextmanager
def rank_failure_monitor(progress: ProgressState) -> Iterator[None]:
    """While inside, leave with exit code 6 once another rank is gone. Every rank must enter, and all leave together.

    Raises:
        LaunchError: in place of gloo's error about a rank that is gone or late.
    """
    if dist.get_world_size() == 1:
        yield
        return
    watch = _DeathWatch(progress)
    try:
        yield
        watch.is_over = True
        # Nobody's end is a death any more once everybody is here.
        dist.barrier()
    except RuntimeError as error:
        if is_connection_lost(error):
            watch.leave()
        if "Timed out" in str(error):
            raise LaunchError(
                f"in iteration {progress.iteration} another rank did not come within --distributed-timeout-minutes; "
                "--watchdog-minutes says which, and where each of them is"
            ) from error
        raise
    finally:
        watch.is_over = True


class _DeathWatch:
    """Two threads that wait, one for the ranks of this host to end and one for word from the others."""

    def __init__(self, progress: ProgressState) -> None:
        self.is_over = False
        self._rank, self._progress = dist.get_rank(), progress
        self._known = threading.Event()
        self._store = connect(os.environ, timedelta(seconds=_GRACE))
        self._word = connect(os.environ, _FOR_EVER)
        here = _pid_namespace()
        places: list[tuple[str, int]] = [("", 0)] * dist.get_world_size()
        dist.all_gather_object(places, (here, os.getpid()))
        self._neighbours = {pid: rank for rank, (host, pid) in enumerate(places) if host == here and rank != self._rank}
        threading.Thread(target=self._watch_neighbours, name="deaths here", daemon=True).start()
        threading.Thread(target=self._await_word, name="deaths elsewhere", daemon=True).start()

    def leave(self) -> NoReturn:
        """Leave for a rank that is gone, once it is known which and the launcher has seen it.

        Raises LaunchError without a message where the cause has been said, else with one.
        """
        is_known = self._known.wait(_LAUNCHER_LOOKS)
        _await_launcher()
        iteration = self._progress.iteration
        raise LaunchError([] if is_known else f"lost a rank of another host in iteration {iteration}")

    def _watch_neighbours(self) -> None:
        if not hasattr(os, "pidfd_open"):
            return
        poll = select.poll()
        ranks = {}
        for pid, rank in self._neighbours.items():
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                return self._found(rank, "")
            ranks[file] = pid, rank
            poll.register(file, select.POLLIN)
        file, _ = poll.poll()[0]
        pid, rank = ranks[file]
        self._found(rank, _end(pid))

    def _found(self, rank: int, end: str | None) -> None:
        """A rank of this host is gone; ``end`` says by what, and is None where it will have said so itself."""
        if self.is_over:
            return
        words = f"rank {rank} was killed{end} in iteration {self._progress.iteration}" if end is not None else ""
        try:
            is_first = self._store.add(f"{_KEY}/finders", 1) == 1
            self._store.set(_KEY, words)
        except RuntimeError:  # the store went with the rank that kept it
            is_first = self._rank == min({self._rank, *self._neighbours.values()} - {rank})
        if is_first and words:
            print_error(words)
        self._end()

    def _await_word(self) -> None:
        try:
            self._word.wait([_KEY])
        except RuntimeError:
            # Its keeper is gone. Who shares a host with it knows better.
            time.sleep(1)
            if not self.is_over and not self._known.is_set() and self._is_first_here():
                print_error(f"rank {self._rank}: lost rank 0 or its host in iteration {self._progress.iteration}")
        self._end()

    def _is_first_here(self) -> bool:
        return self._rank < min(self._neighbours.values(), default=dist.get_world_size())

    def _end(self) -> None:
        """Give the training loop time to notice, and leave if it has not."""
        if self.is_over:
            return
        self._known.set()
        time.sleep(_GRACE)
        if not self.is_over:
            sys.stderr.flush()
            os._exit(LaunchError.exit_code)


def _await_launcher() -> None:
    """Until the launcher, which has seen a rank end, ends this one, too; or long enough that it must have seen it."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    deadline = time.monotonic() + _LAUNCHER_LOOKS
    while not ended and time.monotonic() < deadline:
        time.sleep(0.05)


def _pid_namespace() -> str:
    """A name of the set of processes that this one can see; the same for ranks that see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _end(pid: int) -> str | None:
    """How the process ended, as long as nobody has asked: by a signal, unknown (empty), or in its own words (None)."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    except OSError:
        return ""
    return f" by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else None
