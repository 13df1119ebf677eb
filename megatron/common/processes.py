"""Exit signals and child processes: ranks end with their launcher, and helpers with the process that started them."""

import ctypes
import faulthandler
import multiprocessing
import os
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from megatron.common.errors import LaunchError, ResourceError, first_line

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables that only launchers set: torchrun, deepspeed and the implementations of mpirun."""
_DEEPSPEED_LAUNCHERS = ("deepspeed.launcher.launch", "_deepspeed_launcher.py")
"""Names of DeepSpeed's launcher of a host; ``tools/launch.py`` runs the last one."""
_DEEPSPEED_RUNNERS = ("deepspeed.launcher.runner", "deepspeed", "_deepspeed_runner.py")
"""Names of the deepspeed command; ``tools/launch.py`` runs the last one."""

EXIT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""Signals that schedulers send before they end a job, and Ctrl-C."""
_PASSED_ON = 1.0
"""Seconds within which a launcher forwards a signal that the rank has also received directly."""
_CTRL_C = {signal.SIGINT, signal.SIGTERM}
"""Signals that a rank receives after one Ctrl-C: SIGINT from the terminal, and SIGTERM from its launcher."""


def die_with_parent(parent: int | None = None) -> None:
    """On Linux, let the kernel kill this process when its parent ends, for whatever reason.

    ``parent`` is the parent's process id, if it is known: if the parent has already ended, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent not in (None, os.getppid()):
        os._exit(LaunchError.exit_code)


def exit_with_launcher(environ: Mapping[str, str]) -> None:
    """End this process when its launcher ends, if a launcher started it; a shell may end before its children.

    Otherwise the ranks of a killed launcher would continue to train, and nothing would stop them.
    """
    if not _has_launcher(environ):
        return
    die_with_parent()
    if "CROSS_RANK" in environ and (runner := _deepspeed_runner()) is not None:
        threading.Thread(target=_exit_after, args=(runner,), name="launcher", daemon=True).start()


def leave_torchrun(environ: MutableMapping[str, str]) -> None:
    """Drop the variables of a torchrun below which DeepSpeed's launcher has started this process.

    Its store is not for the ranks of this run, none of which would host one.
    """
    if "TORCHELASTIC_RUN_ID" in environ and "CROSS_RANK" in environ and _is_child_of(_DEEPSPEED_LAUNCHERS):
        for name in ("LOCAL_WORLD_SIZE", *filter(lambda name: name.startswith("TORCHELASTIC_"), [*environ])):
            environ.pop(name, None)


def _is_child_of(programs: Sequence[str]) -> bool:
    import psutil

    with suppress(psutil.Error):
        return any(os.path.basename(argument) in programs for argument in psutil.Process(os.getppid()).cmdline())
    return False


def _has_launcher(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _LAUNCHERS)


def _deepspeed_runner() -> "psutil.Process | None":
    """The deepspeed command on this host, which started the parent of this rank; None if there is none."""
    import psutil

    with suppress(psutil.Error):
        runner = psutil.Process(psutil.Process(os.getppid()).ppid())
        if any(os.path.basename(argument) in _DEEPSPEED_RUNNERS for argument in runner.cmdline()):
            return runner
    return None


def _exit_after(process: "psutil.Process") -> None:
    """Wait until ``process`` has ended, then end this one, unless this one handles a signal such as Ctrl-C already.

    Not ``psutil.Process.wait``, which also waits until the process has been reaped.
    """
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process.pid)], [], [])
    if not any(has_received(signal.getsignal(number)) for number in EXIT_SIGNALS):
        os._exit(LaunchError.exit_code)


def _end_interrupted_runner() -> None:
    """Terminate the deepspeed command before Ctrl-C makes it print a traceback, a quarter of a second later.

    With several hosts it handles signals itself, and is not terminated.
    """
    runner = _deepspeed_runner()
    if runner is not None:
        with suppress(OSError):
            handled = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{runner.pid}/status").read_text())
            if handled and not int(handled[1], 16) >> (signal.SIGTERM - 1) & 1:
                runner.terminate()


class ExitSignal:
    """Handles ``EXIT_SIGNALS``: ``number`` is the first one received, 0 before; the second ends the process at once.

    Until ``defer()`` the first one calls ``exit_at_start`` with its number, in a thread: Python calls no signal handler
    while the main thread is inside a library.
    """

    def __init__(self, exit_at_start: Callable[[int], NoReturn] | None = None) -> None:
        self.number = 0
        self._exit_at_start = exit_at_start
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in EXIT_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # background processes of a shell ignore SIGINT
                signal.signal(number, self._receive)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="exit signals", daemon=True).start()

    def defer(self) -> None:
        """From now on the first signal only sets ``number``."""
        self._exit_at_start = None

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number

    def _watch(self, reader: int) -> None:
        received, first = set[int](), 0.0
        while number := os.read(reader, 1)[0]:
            if number not in EXIT_SIGNALS or signal.getsignal(number) != self._receive:
                continue
            first = first if received else time.monotonic()
            is_passed_on = number not in received and {number, *received} == _CTRL_C and _has_launcher(os.environ)
            # Slurm sends SIGTERM several times to a preempted job, and finally SIGKILL. If all processes of a job
            # receive it, the launcher forwards it in addition.
            is_same = number in received and time.monotonic() - first < _PASSED_ON and _has_launcher(os.environ)
            is_repeated = number == signal.SIGTERM and ("SLURM_STEP_ID" in os.environ or is_same)
            is_second = bool(received) and not is_passed_on and not is_repeated
            received.add(number)
            self.number = self.number or number  # the main thread may be inside of a library
            if exit_at_start := self._exit_at_start:
                exit_at_start(number)
            if is_second:
                os._exit(128 + number)
            if is_passed_on:
                _end_interrupted_runner()


def has_received(handler: object) -> bool:
    """Whether ``handler`` belongs to an ``ExitSignal`` that has received a signal."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, ExitSignal) and bool(owner.number)


def ignore_exit_signals() -> None:
    """Ignore exit signals in a helper process, which ends with its parent."""
    for number in EXIT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_with_parent(parent: int | None = None) -> None:
    """End this helper process with its parent, whose id is ``parent``, also if the parent has ended already.

    Only the parent handles Ctrl-C, which every process of a terminal receives. A helper that outlived its parent would
    wait for work forever and keep the parent's locks and connections open.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def failure_in_child(call: Callable[[], object], *, seconds: float, most_bytes: int) -> str | None:
    """Run ``call`` in a silent child process, which may crash, and return how it failed; None if it returned.

    The child may run for ``seconds``, and allocate ``most_bytes`` in addition to this process's memory.
    """
    os.environ["RUST_BACKTRACE"] = "0"  # the backtrace of a panic, there or later in this process, takes seconds
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads, which the child does not have
        child = os.fork()
    if child == 0:
        _run_in_child(call, writer, seconds, most_bytes)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read(_LONGEST_FAILURE).decode(errors="replace")
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    if code == -signal.SIGALRM:
        return f"takes more than {seconds:g} s"
    aborted = f"ends the process with {signal.Signals(-code).name}" if code < 0 else "fails"
    return message or f"{aborted}, in {most_bytes >> 20:,} MiB of memory"


_LONGEST_FAILURE = 1000


def _run_in_child(call: Callable[[], object], writer: int, seconds: float, most_bytes: int) -> NoReturn:
    code = 1
    try:
        faulthandler.disable()  # it would write to the parent's file
        devnull = os.open(os.devnull, os.O_RDWR)
        os.dup2(devnull, 1), os.dup2(devnull, 2)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):
            size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + most_bytes
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            most = size if hard == resource.RLIM_INFINITY else min(size, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        call()
        code = 0
    except BaseException as error:  # such as the panics of libraries in Rust
        os.write(writer, first_line(error).encode(errors="replace")[:_LONGEST_FAILURE])
    finally:
        os._exit(code)


def run_in_processes(steps: Sequence[Callable[[], object]], what: str) -> None:
    """Call all ``steps`` concurrently, each in a forked process, and wait for them.

    Only writes to shared memory and mapped files are kept. Raises ResourceError, naming ``what``, if a process fails.
    """
    parent, fork = os.getpid(), multiprocessing.get_context("fork")

    def run(step: Callable[[], object]) -> None:
        exit_with_parent(parent)
        step()

    processes = [fork.Process(target=run, args=(step,)) for step in steps]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about threads, which the processes do not have
            for process in processes:
                process.start()
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            connection.wait(running)
            if failed := [process.exitcode for process in processes if process.exitcode]:
                raise ResourceError(f"{what}: a process has ended with {failed[0]}; perhaps it lacked memory")
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def machine_id() -> str:
    """An id of the current boot of this host and of its PID namespace; empty if the system does not report it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def pid_namespace() -> str:
    """A name of the PID namespace of this process, which is the same for ranks that see each other's processes."""
    return machine_id() or socket.gethostname()
