"""Run a program as one of several ranks."""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron.config.environment import check_place, local_rank
from megatron.config.environment import rank as rank_of
from megatron.config.errors import ConfigError, LaunchError, UserError
from megatron.launch.processes import exit_with_launcher

EXIT_CODE_FOLDER = "RANK_EXIT_CODES"
"""Where the environment may name a folder in which each rank leaves its exit code."""


def run_rank(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as one of several ranks and leave the process with the exit code that it returns.

    What every rank sees before they have joined is said by the first of each host alone, and what all raise alike
    behind that by the first of all. Else the rank that fails says so, and leaves at once, without waiting for
    others in the middle of a collective; they notice, and leave with a line each.
    """
    exit_with_launcher(os.environ)
    faulthandler.enable()  # a crash in a library shows its stack
    rank, is_first_here = _place()
    _note(rank, "")
    exit_code = _exit_code(main, rank, is_first_here)
    _note(rank, str(exit_code))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: there gloo's threads abort one process in twenty, the group left or not.
    os._exit(exit_code)


def _exit_code(main: Callable[[], int | None], rank: int, is_first_here: bool) -> int:
    """What ``main`` comes to; what it raises is put on the screen."""
    try:
        exit_code = main() or 0
    except UserError as error:
        joined = _has_joined()
        speaks = (rank == 0 or not error.on_every_rank) if joined else is_first_here
        names_itself = rank > 0 or (joined and not error.on_every_rank)
        if speaks:
            for message in error.messages:
                print_error(f"rank {rank}: {message}" if names_itself else message)
        else:
            # The launcher ends all ranks with the first that ends, which must not be one that said nothing.
            time.sleep(1)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if is_connection_lost(error):
            print_error(f"rank {rank}: another rank failed first")
            return LaunchError.exit_code
        print(f"{_program()}: rank {rank} failed:", file=sys.stderr)
        traceback.print_exc()
        return 1
    _leave_mpi()
    return exit_code


def _note(rank: int, text: str) -> None:
    """Leave word of this rank's end with who started the launcher, if it asked for that."""
    folder = Path(os.environ.get(EXIT_CODE_FOLDER, ""))
    if EXIT_CODE_FOLDER in os.environ and folder.is_dir():  # a launcher may tell other hosts of it, too
        (folder / f"rank {rank}").write_text(text)


def _place() -> tuple[int, bool]:
    """This process's rank, and whether it is the first on its host."""
    try:
        check_place(os.environ)
        return rank_of(os.environ) or 0, not local_rank(os.environ)
    except ConfigError:
        return 0, True  # nobody else may be there to say it


def print_error(message: str) -> None:
    """Put an error on the screen, as the program's."""
    print(f"{_program()}: error: {message}", file=sys.stderr, flush=True)


def _program() -> str:
    return Path(sys.argv[0]).name


def is_connection_lost(error: Exception) -> bool:
    """Whether gloo says that the other end is gone: then the cause, and the traceback that helps, are there."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("Connection closed by peer", "Connection reset by peer")
    )


def _leave_mpi() -> None:
    """What mpi4py would do at the interpreter's end; mpirun takes a process that has not for a failed one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _has_joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()
