"""Hang watchdog: ends a run if a phase takes too long, and reports the position of each rank and which one is hung.

Each rank has two additional threads. One publishes the position of the rank periodically, in a store that also works
while collectives hang. The other checks the time, and uses the store only after the time limit, since the hung rank may
be the one that hosts it.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from deepspeed.runtime.pipe.topology import ProcessTopology

from megatron.common.errors import LaunchError
from megatron.common.files import folder_mode, replace_file
from megatron.config import RunConfig
from megatron.launch.distributed import connect
from megatron.launch.progress import RECORDER, ProgressState, recorded_file, write_recorded
from megatron.launch.rank import print_error
from megatron.parallel.layout import ParallelLayout

_INTERVAL = 1.0
"""Seconds between two reports of a position; less if the time limit is a few seconds."""
_SETTLE = 3.0
"""Seconds for the other ranks to answer the alarm."""
_STORE_SECONDS = 10.0
"""Seconds for the store to respond after an alarm; less if the time limit is less."""
_SHOWN = 8
_ALARM = "hang/alarm"
_AXES = {"model": "tensor-parallel", "data": "data-parallel", "pipe": "pipeline", "sequence": "sequence-parallel"}


@contextmanager
def hang_watchdog(run: RunConfig, layout: ParallelLayout, progress: ProgressState) -> Iterator[None]:
    """Context in which a phase that exceeds ``--watchdog-minutes`` ends the run with exit code 6."""
    if run.logging.watchdog_minutes is None:
        yield
        return
    watchdog = _Watchdog(run, layout, progress, 60 * run.logging.watchdog_minutes)
    try:
        yield
    finally:
        watchdog.stop()
    for thread in watchdog.threads:  # until no thread uses the store
        thread.join(watchdog.store_seconds)


class _Watchdog:
    def __init__(self, run: RunConfig, layout: ParallelLayout, progress: ProgressState, limit: float) -> None:
        self._rank, self._size, self._progress = layout.rank, layout.topology.world_size(), progress
        self._limit, self._interval = limit, min(_INTERVAL, limit / 4)
        self.store_seconds = min(_STORE_SECONDS, limit)
        self._flag = f"--watchdog-minutes {run.logging.watchdog_minutes:g}"
        self._file = Path(run.checkpoint.save or ".") / f"hang-rank{layout.rank}.txt"
        self._groups = group_names(layout.topology, layout.rank)
        self._over = threading.Event()
        self._triggered = threading.Lock()
        self._alarmed = False
        """Whether this rank has noticed the alarm; a rank that has not is reported as hung."""
        self._recorded: Path | None = None
        """The flight recorder file of this rank, once it is written; by a thread, since its disk may hang."""
        self._store = connect(os.environ, timedelta(seconds=self.store_seconds))
        self._postpone_exit()
        targets = {"clock": self._watch_clock, "reports": self._report_positions}
        self.threads = [
            threading.Thread(target=target, name=f"watchdog {name}", daemon=True) for name, target in targets.items()
        ]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the watchdog of this rank."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _watch_clock(self) -> None:
        while not self._over.wait(self._interval):
            if self._progress.seconds > self._limit:
                self._trigger()

    def _report_positions(self) -> None:
        while True:  # report at once: a rank may hang in the first second
            self._postpone_exit()
            try:
                self._report()
                if self._store.check([_ALARM]):
                    self._trigger()
            except RuntimeError:
                return  # the store has ended; the rank failure monitor handles that
            if self._over.wait(self._interval):
                return

    def _postpone_exit(self) -> None:
        # faulthandler's timer is a C thread, which also runs while a library holds the GIL.
        faulthandler.dump_traceback_later(self._limit + 2 * self.store_seconds, exit=True)

    def _report(self) -> None:
        report = {
            "phases_entered": self._progress.phases_entered,
            **self._progress.position(self._groups)._asdict(),
            "alarmed": self._alarmed,
            "host": socket.gethostname(),
        }
        self._store.set(f"hang/{self._rank}", json.dumps(report))

    def _trigger(self) -> None:
        """Write the position of this rank, alert the other ranks, report the hang from one rank, and exit."""
        with self._triggered:
            if self._over.is_set():
                return
            self._alarmed = True
            position = threading.Thread(target=self._write_position, name="hang report", daemon=True)
            position.start()
            position.join(_SETTLE)  # the disk may hang, too
            store_timer = threading.Timer(_SETTLE + self.store_seconds, self._exit_without_store)
            store_timer.daemon = True
            store_timer.start()
            try:
                self._store.set(_ALARM, "")
                self._report()
                threading.Thread(target=self._write_collectives, name="flight recorder", daemon=True).start()
                time.sleep(_SETTLE)
                keys = [f"hang/{rank}" for rank in range(self._size)]
                reports = [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]
            except RuntimeError:
                self._exit_without_store()
            if self._rank == next(rank for rank, report in enumerate(reports) if report and report["alarmed"]):
                recorded = self._recorded and self._recorded.parent
                for line in describe_hang(reports, self._flag, self._file.parent, recorded):
                    print_error(line)
            else:
                time.sleep(_SETTLE)  # the launcher ends all ranks when the first one exits
            self._exit()

    def _write_position(self) -> None:
        """Write the position of this rank and the stacks of its threads into its file, if possible."""
        text = self._progress.position(self._groups).text
        try:
            self._file.parent.mkdir(mode=folder_mode(), parents=True, exist_ok=True)
            with replace_file(self._file, text=True, durable=False) as file:
                print(f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}: {text}", file=file)
                print(f"{self._progress.seconds:.0f} s in this phase\n", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            print_error(f"rank {self._rank}: {self._file} cannot be written: {error.strerror}")

    def _write_collectives(self) -> None:
        """Write the last collectives of this rank; in a separate thread, since the device's library may hang, too."""
        with suppress(OSError, RuntimeError):
            write_recorded(os.environ, self._rank)
        self._recorded = recorded_file(os.environ, self._rank)

    def _exit_without_store(self) -> NoReturn:
        text = self._progress.position(self._groups).text
        print_error(
            f"rank {self._rank}: longer than {self._flag} in {text}; and the rendezvous store does not "
            "respond: its host, rank 0 or torchrun, is stopped, gone or cut off"
        )
        self._exit()

    def _exit(self) -> NoReturn:
        sys.stderr.flush()
        os._exit(LaunchError.exit_code)


def describe_hang(reports: list[dict | None], flag: str, folder: Path, recorded: Path | None = None) -> list[str]:
    """Lines that name the hung ranks and the positions of the others, from the last report of each rank, or None.

    Ranks that do not respond are hung; if all respond, the ranks in the earliest phase that are neither in a collective
    nor waiting for their device. ``recorded`` is the folder of the flight recorder files.
    """
    silent = [rank for rank, report in enumerate(reports) if not (report and report["alarmed"])]
    earliest = min(report["phases_entered"] for report in reports if report)
    last = [rank for rank, report in enumerate(reports) if report and report["phases_entered"] == earliest]
    busy = [rank for rank in last if (report := reports[rank]) and not report["in_collective"]]
    hung = silent or (last if len(last) < len(reports) and not busy else busy)
    limit = f"an iteration, a save or an evaluation takes longer than {flag}; stacks are in {folder}/hang-rank*.txt"
    if recorded is not None:
        limit += f", and the last collectives in {recorded}: torchfrtrace --prefix {RECORDER} {recorded}"
    others = [f"rank {rank}: {_position(report)}" for rank, report in enumerate(reports) if rank not in hung]
    others[_SHOWN:] = [f"and {len(others) - _SHOWN} more ranks"] if len(others) > _SHOWN else []
    causes = [
        f"rank {rank} is hung and does not respond, last seen: {_position(reports[rank])}"
        if rank in silent
        else f"rank {rank} is hung: {_position(reports[rank])}"
        for rank in hung
    ]
    return [limit, *others, *(causes or ["all ranks wait for each other"])]


def _position(report: dict | None) -> str:
    return f"{report['text']} (on {report['host']})" if report else "an unknown position"


def group_names(topology: ProcessTopology, rank: int) -> dict[tuple[int, ...], str]:
    """The names of the process groups of ``rank`` along the axes of ``topology``, by their ranks."""
    return {
        tuple(ranks): _AXES[axis]
        for axis in topology.get_axis_names()
        for ranks in topology.get_axis_comm_lists(axis)
        if len(ranks) > 1 and rank in ranks
    }
