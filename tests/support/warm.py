"""Programs in processes that have torch already: the same from their first line to their exit code, seconds earlier.

For tests of what a run does. How it starts under a launcher, and what it has imported by when, is for others to show.
"""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.ports import free_port
from support.ranks import fork_server

Words = Sequence[str | Path]


def start(words: Words, environ: Mapping[str, str], folder: Path, log: Path) -> BaseProcess:
    """``python WORDS`` in ``folder`` with this environment; its output goes to the end of ``log``."""
    words = [str(word) for word in words]
    process = fork_server().Process(target=_be, args=(words, dict(environ), str(folder), str(log)))
    process.start()
    return process


def start_ranks(processes: int, words: Words, environ: Mapping[str, str], folder: Path, log: Path) -> list[BaseProcess]:
    """The same on so many ranks, as a launcher would; a single one is a plain ``python``."""
    if processes == 1:
        return [start(words, environ, folder, log)]
    place = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environ}
    return [
        start(words, {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder, log) for rank in range(processes)
    ]


def exit_code(ranks: Sequence[BaseProcess], time_limit: float) -> int | None:
    """0, or what the first rank that failed left with, once all have ended; None if they do not, and are killed."""
    deadline = time.monotonic() + time_limit
    failures = []
    running = list(ranks)
    while running and (ended := wait([rank.sentinel for rank in running], max(deadline - time.monotonic(), 0))):
        for rank in [rank for rank in running if rank.sentinel in ended]:
            rank.join()
            running.remove(rank)
            failures += [rank.exitcode] * bool(rank.exitcode)
    for rank in running:
        rank.kill()
        rank.join()
    return None if running else next(iter(failures), 0)


def _be(words: list[str], environ: dict[str, str], folder: str, log: str) -> None:
    """Become the program."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        raise  # as which exit code is for multiprocessing to say
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
