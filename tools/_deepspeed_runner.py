"""The deepspeed command, with a truthful exit code and all variables for the ranks; started by tools/launch.py.

DeepSpeed's runner exits with 0 if the launcher it started was killed by a signal: only positive codes are passed on.
Of torch's and CUDA's variables it sends to other hosts none but NCCL's. A signal ends it a second later or at once,
before the ranks have saved, and ends the ranks of other runs on these hosts, too, or none. Here a signal goes to the
launchers of this run, tools/_deepspeed_launcher.py, and this process waits for them.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import IO, Any, NoReturn

import _project_root  # noqa: F401
import psutil

from megatron.checkpoint.folder_lock import RUN_VARIABLE
from megatron.common.errors import ConfigError, LaunchError, first_line
from megatron.common.processes import die_with_parent
from megatron.launch.rank import EXIT_CODE_FOLDER
from megatron.tools.cluster.remote import ALSO_SENT, device_kind, quote_for_pdsh
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


LAUNCHER = Path(__file__).resolve().with_name("_deepspeed_launcher.py")
_PAUSE = 2.0
SESSION = f"ranks-{os.getpid()}-{time.time_ns()}"
"""Argument of the launchers on other hosts, which tells them from those of other runs."""


def with_own_launcher(words: Any) -> Any:
    """The command of pdsh, or for this host, with ``LAUNCHER`` in place of DeepSpeed's."""
    if not (isinstance(words, list) and _MODULE in words):
        return words
    place = words.index(_MODULE)
    before, python, after = words[: place - 3], words[place - 3], words[place + 1 :]
    if words[0] == "pdsh":  # the shell of a host must not be between ssh and the launcher
        return [*before, "exec", python, "-u", quote_for_pdsh(str(LAUNCHER)), SESSION, *after]
    return [*before, python, "-u", str(LAUNCHER), "", *after]


_EXIT_CODE = re.compile(rb"pdsh@\S+: \S+: ssh exited with exit code (?:\d\d?|1[01]\d|12[0-7]|143)$", re.MULTILINE)
"""What pdsh says about a host whose ranks have ended by themselves; other codes, of a signal or of ssh, are news."""


def _show(stderr: IO[bytes]) -> None:
    """Print what pdsh prints, except for exit codes of ranks: their errors are the last lines on the screen."""
    for line in stderr:
        with suppress(OSError):  # it has been closed
            if text := _EXIT_CODE.sub(b"", line).removeprefix(b"\n"):
                os.write(2, text)


class _Remembered(subprocess.Popen):
    """A child process that is known by ``all`` when the runner has forgotten it, and ends with this process."""

    all: list[subprocess.Popen] = []
    ended: list[subprocess.Popen] = []
    """Those that a first signal has ended."""

    def __init__(self, *args, **kwargs):
        parent, self.env = os.getpid(), kwargs.get("env")
        own = [with_own_launcher(with_log_level(words)) for words in args]
        starts_hosts = own[0][:1] == ["pdsh"] and "stderr" not in kwargs
        if starts_hosts:
            kwargs["stderr"] = subprocess.PIPE
        super().__init__(*own, preexec_fn=lambda: die_with_parent(parent), **kwargs)
        self.all.append(self)
        if starts_hosts:
            threading.Thread(target=_show, args=(self.stderr,), name="stderr of pdsh").start()


def handle_signals() -> None:
    """From here on signals end the launchers. One that is ignored stays so: nohup ignores SIGHUP."""
    for number in FORWARDED:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, end_launchers)


def end_launchers(number: int, frame: FrameType | None) -> None:
    """Send SIGTERM to the launchers, which end the ranks; the runner waits for them. A second signal kills the ranks.

    Before there is a launcher the signal has its default effect.
    """
    running = [child for child in _Remembered.all if str(LAUNCHER) in " ".join(child.args) and child.poll() is None]
    for launcher in running:
        is_second = launcher in _Remembered.ended
        _Remembered.ended.append(launcher)
        if launcher.args[0] == "pdsh" and is_second:
            launcher.kill()  # each connection ends with pdsh, and with it the ranks of a host
        elif launcher.args[0] == "pdsh":
            threading.Thread(target=_end_on_hosts, args=(launcher,), daemon=True).start()
        elif is_second:
            for rank in psutil.Process(launcher.pid).children():
                rank.kill()
        else:
            launcher.terminate()
    if not running:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _end_on_hosts(pdsh: subprocess.Popen) -> None:
    """Send SIGTERM to the launcher of each host; again to all, which ignore it, while one of them has not started."""
    options = takewhile(lambda word: word and not word.rstrip().endswith(";"), pdsh.args)
    # Not to pdsh and ssh, whose command lines have the session, too.
    command = [*options, "pkill", "-f", quote_for_pdsh(rf"^\S*python.*{SESSION}")]
    while pdsh.returncode is None and subprocess.run(command, env=pdsh.env, stderr=subprocess.DEVNULL).returncode:
        time.sleep(_PAUSE)


def main() -> None:
    """Run deepspeed's runner; exit as the launcher that it started did."""
    os.environ.setdefault("DS_ACCELERATOR", device_kind(os.environ, Path.cwd()))
    from deepspeed.launcher import runner

    handle_signals()
    subprocess.Popen = _Remembered
    runner.signal = SimpleNamespace(SIGINT=signal.SIGINT, SIGTERM=signal.SIGTERM, signal=lambda *_: None)
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
