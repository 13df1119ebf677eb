"""Ranks without a launcher: nobody ends the others when one has ended, and each has an exit code of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from support.hosts import INTERFACE, Hosts
from support.ports import free_port
from support.programs import TIME_LIMIT, TINY_MODEL, Programs


class BareRanks:
    """``pretrain_gpt2.py`` with a fault planted in it, on ``ranks`` of ``size``, with the tiny model and corpus.

    On this machine, or with ``hosts`` each on one of these.
    """

    def __init__(
        self,
        programs: Programs,
        log: Path,
        fault: str,
        *arguments: object,
        size: int,
        ranks: Sequence[int] | None = None,
        hosts: Hosts | None = None,
    ):
        place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(free_port()), "FAULT": fault}
        if hosts is not None:
            place |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts.names[0], "GLOO_SOCKET_IFNAME": INTERFACE}
        words = ["tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments, *map(str, arguments)]
        self._log = log
        with open(log, "w") as file:
            self._processes = {
                rank: subprocess.Popen(
                    [*(hosts.on(hosts.names[rank]) if hosts else ()), sys.executable, *words],
                    cwd=programs.root,
                    env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": "0" if hosts else str(place_here)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
                for place_here, rank in enumerate(range(size) if ranks is None else ranks)
            }

    def await_file(self, path: Path) -> None:
        """Wait until one of them has made the file."""
        deadline = time.monotonic() + TIME_LIMIT
        while not path.exists():
            assert time.monotonic() < deadline and not any(map(_has_ended, self._processes.values())), self.output
            time.sleep(0.1)

    def ended(self, *ranks: int) -> list[int]:
        """The exit codes of ``ranks``, of all by default, once they have ended; then the others are killed."""
        chosen = [self._processes[rank] for rank in ranks or self._processes]
        deadline = time.monotonic() + TIME_LIMIT
        try:
            while not all(map(_has_ended, chosen)):
                assert time.monotonic() < deadline, f"ranks did not end:\n{self.output[-6000:]}"
                time.sleep(0.1)
            return [process.wait() for process in chosen]
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    @property
    def output(self) -> str:
        """What all ranks have said."""
        return self._log.read_text()

    @property
    def errors(self) -> list[str]:
        """The lines that the program says as errors."""
        begin = "pretrain_gpt2.py: error: "
        return [line.removeprefix(begin) for line in self.output.splitlines() if line.startswith(begin)]


def _has_ended(process: subprocess.Popen) -> bool:
    """Without asking how, after which nobody else could."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def await_processes(word: str, number: int) -> list[psutil.Process]:
    """The processes with ``word`` on their command line, once there are so many: 0 waits for the last to end."""
    deadline = time.monotonic() + TIME_LIMIT
    while time.monotonic() < deadline:
        found = [process for process in psutil.process_iter() if word in _command_line(process)]
        if len(found) == number:
            return found
        time.sleep(0.2)
    for process in found:
        process.send_signal(signal.SIGKILL)
    raise AssertionError(f"{len(found)} processes instead of {number}: {found}")


def _command_line(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.Error:
        return ""
