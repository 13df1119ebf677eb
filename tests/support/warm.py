"""Programs in processes that have torch already: the same from their first line to their exit code, seconds earlier.

For tests of what a run does. How it starts under a launcher, and what it has imported by when, is for others to show.
"""

import json
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from support.ranks import fork_server

from megatron.common.processes import die_with_parent
from megatron.launch.environment import free_port

Words = Sequence[str | Path]
_LOOKS = 0.2
"""Seconds after the end of a rank that failed in which the others can still read its exit status: launchers poll."""


def start(words: Words, environ: Mapping[str, str], folder: Path, log: Path) -> BaseProcess:
    """``python WORDS`` in ``folder`` with this environment; its output goes to the end of ``log``."""
    words = [str(word) for word in words]
    process = fork_server().Process(target=be, args=(words, dict(environ), str(folder), str(log)))
    process.start()
    return process


def start_ranks(processes: int, words: Words, environ: Mapping[str, str], folder: Path, log: Path) -> list[BaseProcess]:
    """The same on that many ranks, each for itself."""
    return [start(words, place, folder, log) for place in places(processes, environ)]


def launch_ranks(processes: int, words: Words, environ: Mapping[str, str], folder: Path, log: Path) -> BaseProcess:
    """The same under a launcher, whose exit code is that of the first rank that failed; all end with it.

    It ends no rank when another has failed: they notice.
    """
    words = [str(word) for word in words]
    process = fork_server().Process(target=launch, args=(places(processes, environ), words, str(folder), str(log)))
    process.start()
    return process


def start_unreaped(ranks: list[dict[str, str]], words: Words, folder: Path, log: Path, codes: Path) -> BaseProcess:
    """The same on ranks with these environments, of which the others can see how they have ended until all have.

    ``codes`` becomes JSON: the exit code of each, in order.
    """
    words = [str(word) for word in words]
    process = fork_server().Process(target=keep, args=(ranks, words, str(folder), str(log), str(codes)))
    process.start()
    return process


def places(processes: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank."""
    shared = {**environ, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


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


def launch(ranks: list[dict[str, str]], words: list[str], folder: str, log: str) -> NoReturn:
    """Become the launcher of a program, whose ranks have these environments."""
    running = {_fork_rank(place, words, folder, log) for place in ranks}
    code = 0
    while running:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended.si_status:
            time.sleep(_LOOKS)
        _, status = os.waitpid(ended.si_pid, 0)
        code = code or os.waitstatus_to_exitcode(status)
        running.remove(ended.si_pid)
    raise SystemExit(128 - code if code < 0 else code)


def keep(ranks: list[dict[str, str]], words: list[str], folder: str, log: str, codes: str) -> None:
    """Become the parent of a program's ranks, which reaps none before all have ended."""
    running = [_fork_rank(place, words, folder, log) for place in ranks]
    for process in running:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    found = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in running]
    Path(codes).write_text(json.dumps(found))


def _fork_rank(place: dict[str, str], words: list[str], folder: str, log: str) -> int:
    if process := os.fork():
        return process
    try:
        die_with_parent()
        be(words, place, folder, log)
    finally:
        os._exit(1)  # a rank leaves by itself, with a code of its own


def be(words: list[str], environ: dict[str, str], folder: str, log: str, errors: str | None = None) -> None:
    """Become the program; what it says on stderr goes into the file ``errors``, by default into ``log``, too."""
    for stream, file in ((1, log), (2, errors or log)):
        output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, stream)
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
