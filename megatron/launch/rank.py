"""Runs a program as a rank: each error is printed once, with the right exit code, and no process is left behind."""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from megatron.common.environment import adopt_slurm_task, check_place, local_rank
from megatron.common.environment import rank as rank_of
from megatron.common.errors import (
    ConfigError,
    LaunchError,
    ResourceError,
    UserError,
    failure_of_host,
    one_line,
    unusable_path,
)
from megatron.common.files import restrict_new_files
from megatron.common.packages import required_packages
from megatron.common.processes import exit_with_launcher, ignore_exit_signals, leave_torchrun
from megatron.common.screen import ignore_lost_output, release_stderr
from megatron.launch.host_limits import check_host

EXIT_CODE_FOLDER = "RANK_EXIT_CODES"
"""Environment variable: a folder in which each rank writes its exit code."""
TRAINED = "trained"
"""File in that folder that rank 0 creates after its first iteration."""

_LOST = (
    "Connection closed by peer",  # gloo
    "Connection reset by peer",  # gloo, NCCL
    "Connection closed by remote peer",  # NCCL
    "Connection was likely closed",  # the store, when NCCL communicators are created
    "Broken pipe",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""Parts of error messages of gloo and NCCL about a rank that has ended."""
_LATE = (
    "Timed out waiting",  # gloo
    "Timed out after",
    "Watchdog caught collective operation timeout",  # NCCL
    "milliseconds before timing out",
    "wait timeout after",  # the store
)
"""Parts of error messages about a collective that timed out."""
_WORKER_CRASH = re.compile(r"DataLoader worker \(pid [0-9]+\) is killed by signal: (.+?)\. ")


def run_rank(main: Callable[[], int | None]) -> NoReturn:
    """Run ``main`` as a rank and end the process with the exit code that it returns.

    Errors before the process group is joined are printed by the first rank of each host, and later errors that all
    ranks raise by rank 0. Otherwise the rank that fails prints its error and exits at once, without waiting for other
    ranks in the middle of a collective; they notice, and exit with one line each.
    """
    ignore_lost_output()
    _show_crashes(os.environ)
    exit_with_launcher(os.environ)
    leave_torchrun(os.environ)
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a KeyboardInterrupt during an import may be lost
    threading.excepthook = _report_thread
    try:
        adopt_slurm_task(os.environ)
    except ConfigError as error:
        print_error(str(error))
        _exit(error.exit_code, 0)
    rank, is_first_on_host = _rank_and_is_first()
    _write_exit_code(rank, "")
    _exit(_exit_code(main, rank, is_first_on_host), rank)


def _show_crashes(environ: Mapping[str, str]) -> None:
    """Print the stack of Python when a library crashes, also while stderr is buffered.

    The end of a rank is reported by another one. That of the only rank is by a process that waits for it.
    """
    output = os.dup(2)
    if environ.get("WORLD_SIZE", "1") == "1":
        with suppress(OSError):  # the limits of the host are checked later
            reader, writer = os.pipe()
            if not os.fork():
                os.close(writer)
                _report_crash(reader)
            os.close(reader)
            output = writer
    faulthandler.enable(output)


_SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}
"""Descriptions of signals, which faulthandler prints, to their names."""


def _report_crash(reader: int) -> NoReturn:
    """Print what comes out of a pipe when its other end has been closed, and then an error; nothing if it is empty."""
    try:
        ignore_exit_signals()
        with open(reader, "rb") as pipe:
            stack = pipe.read().decode(errors="replace")
        if stack:
            kind = stack.partition("\n")[0].removeprefix("Fatal Python error: ")
            print(stack, file=sys.stderr, flush=True)
            ended = f"ended by {_SIGNALS.get(kind, kind)}"
            print_error(f"{ended}: a library has crashed where the stack above says, or the signal was sent")
    finally:
        os._exit(0)


def _report_thread(failed: threading.ExceptHookArgs) -> None:
    """Print the exception of a thread, unless the main thread does: of TensorBoard's, and for limits of the host."""
    is_reported = type(failed.thread).__module__.startswith("tensorboard.")
    if not is_reported and (failed.exc_value is None or failure_of_host(failed.exc_value) is None):
        threading.__excepthook__(failed)


def _exit(exit_code: int, rank: int) -> NoReturn:
    """End this process, from any thread."""
    _write_exit_code(rank, str(exit_code))
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's shutdown, during which gloo's threads abort one process in twenty.
    os._exit(exit_code)


def exit_now(reason: str, exit_code: int) -> NoReturn:
    """End this process, from any thread; the first rank of each host prints ``reason``."""
    rank, is_first_on_host = _rank_and_is_first()
    release_stderr()
    if is_first_on_host:
        print_error(f"rank {rank}: {reason}" if rank else reason)
    else:
        time.sleep(1)  # see _exit_code
    _exit(exit_code, rank)


def _exit_code(main: Callable[[], int | None], rank: int, is_first_on_host: bool) -> int:
    """Run ``main`` and print its errors. Returns the exit code."""
    try:
        restrict_new_files(os.environ)
        check_host(os.environ)
        with required_packages():
            exit_code = main() or 0
    except UserError as error:
        distributed = sys.modules.get("torch.distributed")
        joined = distributed is not None and distributed.is_initialized()
        prints = (rank == 0 or not error.on_every_rank) if joined else is_first_on_host or error.only_here
        names_itself = rank > 0 or (joined and not error.on_every_rank)
        if prints:
            for message in error.messages:
                print_error(f"rank {rank}: {message}" if names_itself else message)
        else:
            # The launcher ends all ranks when the first one exits, so the rank that prints must exit first. srun
            # returns the largest exit code of all ranks, such as 143 for a rank that it has ended.
            signal.signal(signal.SIGTERM, lambda *_, code=error.exit_code: _exit(code, rank))
            time.sleep(1)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        sys.unraisablehook = lambda _: None  # partly built objects may fail again when they are deleted
        if (problem := unusable_path(error)) is not None:
            print_error(problem)
            return ConfigError.exit_code
        if known := explanation(error):
            names_itself = rank > 0 or isinstance(known, LaunchError)
            print_error(f"rank {rank}: {known}" if names_itself else str(known))
            return known.exit_code
        time.sleep(1)  # rank 0 may be about to print the line of the previous iteration; the cause must come last
        print(f"{_program()}: rank {rank} failed:", file=sys.stderr)
        traceback.print_exc()
        return 1
    _finalize_mpi()
    return exit_code


def _write_exit_code(rank: int, text: str) -> None:
    """Write the exit code of this rank (empty: it is running) into ``EXIT_CODE_FOLDER``, if that is set."""
    folder = Path(os.environ.get(EXIT_CODE_FOLDER, ""))
    with suppress(OSError):  # a shared folder may be full or gone; this process must end anyway
        if EXIT_CODE_FOLDER in os.environ and folder.is_dir():  # launchers may set the variable on other hosts, too
            (folder / f"rank {rank}").write_text(text)


def _rank_and_is_first() -> tuple[int, bool]:
    """The rank of this process, and whether it is the first rank of its host; rank 0 always is."""
    try:
        check_place(os.environ)
        rank = rank_of(os.environ) or 0
        return rank, not rank or not local_rank(os.environ)
    except ConfigError:
        return 0, True  # maybe no other rank exists to print the error


def print_error(message: str) -> None:
    """Print an error of the program to stderr, after flushing stdout."""
    sys.stdout.flush()
    _print_line(f"error: {message}")


def print_warning(message: str) -> None:
    """Print a warning of the program to stderr."""
    _print_line(f"warning: {one_line(message)}")


def _print_line(text: str) -> None:
    """Print a line to stderr in one write; a print is two with ``python -u``, which launchers start ranks with."""
    print(f"{_program()}: {text}\n", end="", file=sys.stderr, flush=True)


def _program() -> str:
    return Path(sys.argv[0]).name


def _finalize_mpi() -> None:
    """Finalize MPI, as mpi4py does at the interpreter's exit; otherwise mpirun reports a failed process."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def explanation(error: Exception) -> UserError | None:
    """A UserError that explains an error of a backend or about a limit of the host; None for other errors."""
    if is_connection_lost(error):
        return LaunchError("another rank failed first")
    if (limit := failure_of_host(error)) is not None:
        return ResourceError(limit)
    if crash := _WORKER_CRASH.search(str(error)):
        return LaunchError(f"a worker of the DataLoader has crashed, or was sent a signal ({crash[1]})")
    late = "a collective did not end within --distributed-timeout-minutes" if is_timeout(error) else None
    reason = late or failure_of_nccl(error)
    return None if reason is None else LaunchError(reason)


def is_connection_lost(error: Exception) -> bool:
    """Whether the backend raised ``error`` because another rank has ended; that rank prints the cause."""
    return _contains(error, _LOST) and not is_timeout(error)


def is_timeout(error: Exception) -> bool:
    """Whether the backend raised ``error`` because a collective timed out."""
    return _contains(error, _LATE)


def failure_of_nccl(error: Exception) -> str | None:
    """The cause of another error of NCCL, in one line; None if ``error`` is not from NCCL."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "NCCL error" not in text:
        return None
    _, _, last = text.partition("Last error:")
    named = re.search(r"nccl[A-Z]\w+: .*", text)
    line = next((line.strip() for line in last.splitlines() if line.strip()), named[0].strip() if named else text)
    return f"NCCL failed: {line}; NCCL_DEBUG=INFO shows what it did before"


def _contains(error: Exception, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
