"""The deepspeed command, with a truthful exit code and all variables for the ranks; started by tools/launch.py.

DeepSpeed's runner exits with 0 if the launcher it started was killed by a signal: only positive codes are passed on.
Of torch's and CUDA's variables it sends to other hosts none but NCCL's. SIGUSR1 and SIGHUP end it, and leave the ranks
on other hosts training; if all ranks are on this host, any signal ends it, and the ranks with it, before they have
saved. Here each signal ends the launchers, and they the ranks.
"""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import _project_root  # noqa: F401
import psutil

from megatron.checkpoint.folder_lock import RUN_VARIABLE
from megatron.common.errors import ConfigError, LaunchError, first_line
from megatron.launch.rank import EXIT_CODE_FOLDER
from megatron.tools.cluster.remote import ALSO_SENT, device_kind
from megatron.tools.cluster.supervise import FORWARDED

_MODULE = "deepspeed.launcher.launch"
"""Starts the ranks of a host."""


def with_log_level(words: Any) -> Any:
    """The command of pdsh with the log level for the launchers of hosts: at theirs, "info", they print variables."""
    if not (isinstance(words, list) and words[:1] == ["pdsh"] and _MODULE in words):
        return words
    place = words.index(_MODULE) + 1
    level = logging.getLevelName(logging.getLogger("DeepSpeed").level).lower()
    return [*words[:place], f"--log_level={level}", *words[place:]]


class _Remembered(subprocess.Popen):
    """A child process that is known by ``all`` when the runner has forgotten it."""

    all: list[subprocess.Popen] = []
    ended: list[subprocess.Popen] = []
    """Those that a first signal has ended."""

    def __init__(self, *args, **kwargs):
        super().__init__(*[with_log_level(words) for words in args], **kwargs)
        self.all.append(self)


def handle_signals() -> None:
    """From here on signals end the launchers. One that is ignored stays so: nohup ignores SIGHUP."""
    for number in FORWARDED:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_launchers)


def end_launchers(number: int, frame: FrameType | None) -> None:
    """Do what DeepSpeed's runner does after SIGTERM, if it started launchers on several hosts.

    Otherwise send SIGTERM to the launcher of this host, which ends the ranks one after the other; the runner waits for
    it. A second signal kills the ranks. Before there is a launcher the signal has its default effect.
    """
    handler = signal.getsignal(signal.SIGTERM)
    running = [child for child in _Remembered.all if child.args[2:4] == ["-m", _MODULE] and child.poll() is None]
    if callable(handler) and handler is not end_launchers:
        handler(number, frame)
    elif running:
        for launcher in running:
            if launcher in _Remembered.ended:
                for rank in psutil.Process(launcher.pid).children():
                    rank.kill()
            else:
                _Remembered.ended.append(launcher)
                launcher.terminate()
    else:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def main() -> None:
    """Run deepspeed's runner; exit as the launcher that it started did."""
    os.environ.setdefault("DS_ACCELERATOR", device_kind(os.environ, Path.cwd()))
    from deepspeed.launcher import runner

    handle_signals()
    subprocess.Popen = _Remembered
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Unable to find hostfile" not in record.getMessage())
    runner.EXPORT_ENVS += ALSO_SENT
    if RUN_VARIABLE in os.environ:  # an elastic run: its ranks leave their exit codes in a folder that hosts share
        runner.EXPORT_ENVS += (RUN_VARIABLE, EXIT_CODE_FOLDER)
    try:
        runner.main()
    except OSError as error:
        _fail(f"the ranks cannot be started ({error.strerror})", LaunchError.exit_code)
    except ValueError as error:  # slots, or those of CUDA_VISIBLE_DEVICES, which become --include
        _fail(f"{first_line(error)}: name this host's by number, or --num_gpus", ConfigError.exit_code)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        problem = first_line(error)
        if isinstance(error, subprocess.CalledProcessError):
            problem = "the first host does not tell its address over ssh: name it by --master_addr"
        elif not any(known in problem for known in ("not installed.", "not reachable via ssh", "no GPU resources")):
            raise
        _fail(f"{problem} (tools/doctor.py looks for the cause)", LaunchError.exit_code)
    signals = [-child.returncode for child in _Remembered.all if (child.returncode or 0) < 0]
    sys.exit(128 + signals[0] if signals else 0)


def _fail(problem: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"launch.py: error: {problem}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
