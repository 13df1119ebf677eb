"""Watches a start of an elastic run: lost hosts, hosts that come back, and the agent's lock."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megatron.checkpoint.folder_lock import last_renewal
from megatron.launch.rank import TRAINED
from megatron.tools.cluster.elastic import Start, announce, is_complete
from megatron.tools.cluster.supervise import FINAL, read_exit_codes

if TYPE_CHECKING:
    from megatron.tools.cluster.elastic_run import ElasticRun

ALIVE_SECONDS = 3
"""ServerAliveInterval of ssh, which closes the connection to a host that is silent for three times as long."""
_NOTICE_SECONDS = 3.0
"""Time for ranks on other hosts to notice the end of a host's ranks, and to print the cause."""
END_SECONDS = 60.0
"""Time for ranks on other hosts to end when no restart follows."""
_CONNECT_SECONDS = 5.0
"""Time from the first connection after which a host without a connection counts as gone."""
_STOPPED_SECONDS = 60.0
"""Time without renewal of its lock after which rank 0 counts as stopped. ``--watchdog-minutes`` finds other ranks."""
_LOOK_SECONDS = 1.0
_REJOIN_SECONDS = 20.0
"""Interval of checks of lost hosts."""


class Watch:
    """Decides when to end a start: hosts are lost, or lost hosts have come back and there is a new checkpoint."""

    def __init__(self, run: "ElasticRun", start: Start, exit_codes: Path) -> None:
        self.is_over = threading.Event()
        self.hosts_rejoin = False
        self.gone: set[str] = set()
        """Hosts whose connection has ended."""
        self.noticed: float | None = None
        """Time at which the failure was noticed for which the start is ended."""
        self.start, self._run, self._exit_codes = start, run, exit_codes
        self._connections: dict[str, psutil.Process] = {}
        self._connected_at: float | None = None
        self._gone_since = 0.0
        self._renewal: str | None = None
        self._without_renewal = 0.0
        self._next, self._came_back_at = 0.0, ""
        self._came_back: frozenset[str] | None = None
        """Hosts of a start with more ranks that has become possible."""
        if run.launch.rejoin and not is_complete(run.regular, start.hosts):
            threading.Thread(target=self._await_hosts, name="rejoin", daemon=True).start()

    def __call__(self, launcher: psutil.Process, ends_by_signal: bool) -> bool:
        """Whether to end the start with this ``launcher``. Raises CheckpointError if another agent has taken over."""
        if not ends_by_signal and self._came_back and (self._run.progress() or "") != self._came_back_at:
            announce(f"hosts have come back: ended after {self._run.progress()}, to start with them")
            self.hosts_rejoin = True
            self._run.awaited.add(self._came_back)
            return True
        self._note_training()
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _LOOK_SECONDS
            self._run.lock.check()
            if len(self._connections) < len(self.start.hosts):
                self._connections |= connections(launcher, [host.name for host in self.start.hosts])
            if self._connections and self._connected_at is None:
                self._connected_at = now
            if self._is_stopped():
                announce(f"rank 0 has not responded for {_STOPPED_SECONDS:.0f} s: ended")
                return True
        return self._has_lost_hosts(now, ends_by_signal)

    def _note_training(self) -> None:
        run = self._run
        if run.failed_at is not None and (self._exit_codes / TRAINED).exists():
            announce(f"training again {time.time() - run.failed_at:.1f} s after the failure was noticed")
            run.failed_at = None

    def _has_lost_hosts(self, now: float, ends_by_signal: bool) -> bool:
        """Whether a host or its ranks have ended, so that the ranks of other hosts must be ended."""
        gone = {host for host, ssh in self._connections.items() if not _runs(ssh)}
        if self._connected_at is not None and now - self._connected_at > _CONNECT_SECONDS:
            gone |= self.start.names - self._connections.keys()  # the connection ended before it was observed
        if not gone:
            return False
        ends_well = ends_by_signal or self._ends_without_restart(gone)
        if gone - self.gone:
            if not self.gone or ends_well:
                self._gone_since = now
            if not ends_well:
                self.noticed = self.noticed or time.time()
            self.gone = gone
        if now - self._gone_since < (END_SECONDS if ends_well else _NOTICE_SECONDS):
            return False
        announce(f"the ranks of {' '.join(sorted(gone))} have ended, or are lost: the ranks of other hosts are ended")
        return True

    def _is_stopped(self) -> bool:
        """Whether rank 0 has stopped renewing its lock, although the file can be read. Must be called every second."""
        before, self._renewal = self._renewal, last_renewal(self._run.save, self._run.token)
        is_new = self._renewal is None or self._renewal != before
        self._without_renewal = 0.0 if is_new else self._without_renewal + _LOOK_SECONDS
        return self._without_renewal >= _STOPPED_SECONDS

    def _ends_without_restart(self, gone: set[str]) -> bool:
        """Whether all hosts are gone, or all ranks on the hosts ``gone`` have written exit codes that end the run."""
        codes = read_exit_codes(self._exit_codes)
        left = [codes.get(rank, "") for rank in self.start.ranks_on(gone)]
        return len(gone) == len(self.start.hosts) or all(code and int(code) in FINAL for code in left)

    def _await_hosts(self) -> None:
        """Wait until a start with more ranks is possible, on hosts that have come back."""
        try:
            while not self.is_over.wait(_REJOIN_SECONDS):
                start = self._run.choose(self._run.look())
                if self.is_over.is_set():
                    return
                if start is not None and self._is_better(start):
                    names = sorted(start.names - self.start.names)
                    announce(f"{' '.join(names)} can take part again, from the next checkpoint on")
                    self._came_back_at = self._run.progress() or ""
                    self._came_back = start.names
                    return
        except Exception as error:
            announce(f"{type(error).__name__} in the search for hosts that have come back, which ends: {error}")

    def _is_better(self, start: Start) -> bool:
        """Whether ``start`` has more ranks than the current one, and an earlier attempt to start it did not fail."""
        return len(start.host_names) > len(self.start.host_names) and start.names not in self._run.awaited


def connections(launcher: psutil.Process, hosts: Sequence[str]) -> dict[str, psutil.Process]:
    """The ssh process of pdsh for each of ``hosts`` that is connected."""
    by_host: dict[str, psutil.Process] = {}
    for process in _children(launcher, recursive=True):
        with suppress(psutil.Error):  # it has just ended
            if _is_pdsh(process):
                for ssh in _children(process):
                    with suppress(psutil.Error):
                        # A child that is not ssh yet has the command line of pdsh, with the names of all hosts.
                        if not _is_pdsh(ssh):
                            by_host |= {host: ssh for host in set(hosts).intersection(ssh.cmdline())}
    return by_host


def _is_pdsh(process: psutil.Process) -> bool:
    return process.name().startswith("pdsh")  # Debian's is called pdsh.bin


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.Error:
        return []


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
