"""Runs ranks in forks of this process, one by one or a few at a time. No torch here."""

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron.common.errors import UserError
from megatron.common.processes import die_with_parent


class RankResult(NamedTuple):
    """Result of a rank's process."""

    rank: int
    result: Any
    """Return value of its function; None if it failed."""
    exit_code: int
    """0, the exit code of its error, or 1; negative after a signal."""
    output: list[str]
    """Non-blank lines of stdout and stderr."""


def run_in_forks(
    ranks: Sequence[int], run: Callable[[int], Any], folder_of: Callable[[int], Path], processes: int = 1
) -> Iterator[RankResult]:
    """Call ``run`` with each of ``ranks`` in a process of its own, which logs to the folder of the rank."""
    context = multiprocessing.get_context("fork")
    pending = list(ranks)
    running: dict[Any, Any] = {}
    try:
        while pending or running:
            while pending and len(running) < processes:
                rank = pending.pop(0)
                folder_of(rank).mkdir(parents=True, exist_ok=True)
                process = context.Process(target=_run, args=(run, rank, folder_of(rank)))
                process.start()
                running[process.sentinel] = rank, process
            for sentinel in wait(list(running)):
                rank, process = running.pop(sentinel)
                process.join()
                yield _read_result(rank, process.exitcode, folder_of(rank))
    finally:
        for _, process in running.values():
            process.kill()  # SIGTERM would end the program only after its iteration
            process.join()


def _run(run: Callable[[int], Any], rank: int, folder: Path) -> NoReturn:
    die_with_parent()
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        (folder / "result").write_bytes(pickle.dumps(run(rank)))
        code = 0
    except UserError as error:
        print("\n".join(error.messages), file=sys.stderr)
        code = error.exit_code
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read_result(rank: int, exit_code: int, folder: Path) -> RankResult:
    file, result = folder / "result", None
    if exit_code == 0:
        result = pickle.loads(file.read_bytes())  # noqa: S301, written by this tool
        file.unlink()
    output = (folder / "log.txt").read_text(errors="replace").splitlines()
    return RankResult(rank, result, exit_code, [line for line in output if line.strip()])
