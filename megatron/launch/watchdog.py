"""What takes too long is ended: each rank writes where it is, and one says who is behind.

Beside the training loop each rank has two threads. One tells the others where the rank is, once a beat, through a
store that answers while collectives hang. The other has the clock, and touches the store only when time is over: a
rank that is stopped may be the one that keeps it.
"""

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from deepspeed.runtime.pipe.topology import ProcessTopology

from megatron.config import RunConfig
from megatron.config.errors import LaunchError
from megatron.launch.progress import ProgressState
from megatron.launch.rank import print_error
from megatron.launch.rendezvous import connect
from megatron.parallel.layout import ParallelLayout

_BEAT = 1.0
"""Seconds between two words to the others; less where the limit is a few seconds."""
_SETTLE = 3.0
"""Seconds that the other ranks have to answer the alarm."""
_ANSWER = 10.0
"""Seconds for the store to answer, once there is an alarm; less where the limit is."""
_SHOWN = 8
_ALARM = "hang/alarm"
_AXES = {"model": "tensor-parallel", "data": "data-parallel", "pipe": "pipeline", "sequence": "sequence-parallel"}


@contextmanager
def hang_watchdog(run: RunConfig, layout: ParallelLayout, progress: ProgressState) -> Iterator[None]:
    """While inside, end a run one of whose phases exceeds ``--watchdog-minutes``, with exit code 6."""
    if run.logging.watchdog_minutes is None:
        yield
        return
    watchdog = _Watchdog(run, layout, progress)
    try:
        yield
    finally:
        watchdog.stop()


class _Watchdog:
    def __init__(self, run: RunConfig, layout: ParallelLayout, progress: ProgressState) -> None:
        self._rank, self._size, self._progress = layout.rank, layout.topology.world_size(), progress
        self._limit = 60 * run.logging.watchdog_minutes
        self._beat = min(_BEAT, self._limit / 4)
        self._answer = min(_ANSWER, self._limit)
        self._minutes = f"--watchdog-minutes {run.logging.watchdog_minutes:g}"
        self._file = Path(run.checkpoint.save or ".") / f"hang-rank{layout.rank}.txt"
        self._groups = group_names(layout.topology)
        self._over = threading.Event()
        self._barks = threading.Lock()
        self._heard = False
        """Whether this rank knows of the alarm: a rank that does not, behind it, does not answer."""
        self._store = connect(os.environ, timedelta(seconds=self._answer))
        self._put_off_the_end()
        for name, work in (("clock", self._keep_time), ("teller", self._tell_others)):
            threading.Thread(target=work, name=f"watchdog {name}", daemon=True).start()

    def stop(self) -> None:
        """Let the run be from now on."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _keep_time(self) -> None:
        while not self._over.wait(self._beat):
            if self._progress.seconds > self._limit:
                self._bark()

    def _tell_others(self) -> None:
        while not self._over.wait(self._beat):
            self._put_off_the_end()
            try:
                self._tell()
                if self._store.check([_ALARM]):
                    self._bark()
            except RuntimeError:
                return  # the store is gone: whether that is a fault, the watch over deaths knows

    def _put_off_the_end(self) -> None:
        # Where a library holds Python's lock no thread of ours runs; this one is not Python's.
        faulthandler.dump_traceback_later(self._limit + 2 * self._answer, exit=True)

    def _tell(self) -> None:
        place = self._progress.place(self._groups)
        told = {
            "entered": self._progress.entered,
            "text": place.text,
            "waits": place.waits,
            "heard": self._heard,
            "host": socket.gethostname(),
        }
        self._store.set(f"hang/{self._rank}", json.dumps(told))

    def _bark(self) -> NoReturn:
        """Write where this rank is, bring the others to do it too, have one of them speak, and leave."""
        with self._barks:
            if self._over.is_set():
                return
            self._heard = True
            self._write()
            helpless = threading.Timer(_SETTLE + self._answer, self._leave_without_store)
            helpless.daemon = True
            helpless.start()
            try:
                self._store.set(_ALARM, "")
                self._tell()
                time.sleep(_SETTLE)
                told = [self._told(rank) for rank in range(self._size)]
            except RuntimeError:
                self._leave_without_store()
            if self._rank == next(rank for rank, words in enumerate(told) if words and words["heard"]):
                for line in explain(told, self._minutes, self._file.parent):
                    print_error(line)
            else:
                time.sleep(_SETTLE)  # the launcher ends all with the first that ends
            self._leave()

    def _told(self, rank: int) -> dict | None:
        key = f"hang/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _write(self) -> None:
        """The place of this rank and the stacks of its threads; nothing where no file can be had."""
        place = self._progress.place(self._groups)
        try:
            self._file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with open(self._file, "w", opener=lambda path, _: os.open(path, flags, 0o640)) as file:
                print(f"rank {self._rank}, process {os.getpid()} on {socket.gethostname()}: {place.text}", file=file)
                print(f"{self._progress.seconds:.0f} s in this phase\n", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            print_error(f"rank {self._rank}: {self._file} cannot be written: {error.strerror}")

    def _leave_without_store(self) -> NoReturn:
        place = self._progress.place(self._groups)
        print_error(
            f"rank {self._rank}: longer than {self._minutes} in {place.text}; and the rendezvous store "
            "does not respond: its host, rank 0 or torchrun, is stopped, gone or cut off"
        )
        self._leave()

    def _leave(self) -> NoReturn:
        sys.stderr.flush()
        os._exit(LaunchError.exit_code)


def explain(told: list[dict | None], limit: str, folder: Path) -> list[str]:
    """Who is behind, from what each rank told last (None: nothing yet), and where the others are."""
    silent = [rank for rank, words in enumerate(told) if not (words and words["heard"])]
    least = min(words["entered"] for words in told if words)
    last = [rank for rank, words in enumerate(told) if words and words["entered"] == least]
    busy = [rank for rank in last if not told[rank]["waits"]]
    behind = silent or (last if len(last) < len(told) and not busy else busy)
    where = f"an iteration, a save or an evaluation takes longer than {limit}; stacks are in {folder}/hang-rank*.txt"
    others = [f"rank {rank}: {_position(words)}" for rank, words in enumerate(told) if rank not in behind]
    if len(others) > _SHOWN:
        others = [*others[:_SHOWN], f"and {len(others) - _SHOWN} ranks more"]
    causes = [
        f"rank {rank} is hung and does not respond, last seen in {_position(told[rank])}"
        if rank in silent
        else f"rank {rank} is hung: {_position(told[rank])}"
        for rank in behind
    ]
    return [where, *others, *(causes or ["all ranks wait for each other"])]


def _position(words: dict | None) -> str:
    return f"{words['text']} (on {words['host']})" if words else "an unknown position"


def group_names(topology: ProcessTopology) -> dict[tuple[int, ...], str]:
    """What the groups along the axes of ``topology`` are called, by their ranks."""
    return {
        tuple(ranks): _AXES[axis]
        for axis in topology.get_axis_names()
        for ranks in topology.get_axis_comm_lists(axis)
        if len(ranks) > 1
    }
