"""Ranks without a launcher: none is killed when another has ended, and each has its own exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from support.hosts import INTERFACE, Hosts
from support.programs import TIME_LIMIT, TINY_MODEL, Programs
from support.warm import start, start_unreaped

from megatron.launch.environment import free_port


class BareRanks:
    """``pretrain_gpt2.py`` with a fault planted in it, on ``ranks`` of ``size``, with the tiny model and corpus.

    On this machine, or with ``hosts`` each on one of these. With ``corpses`` the others can see how one has ended,
    as under a launcher that does not look.
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
        corpses: bool = False,
    ):
        place = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": str(free_port()), "FAULT": fault}
        if hosts is not None:
            place |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts.names[0], "GLOO_SOCKET_IFNAME": INTERFACE}
        words = ["tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments, *map(str, arguments)]
        self._log = log
        log.touch()
        self._processes: dict[int, subprocess.Popen | BaseProcess] = {}
        self._codes = log.with_suffix(".codes")
        self._keeper: BaseProcess | None = None
        environs = {
            rank: {**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": "0" if hosts else str(place_here)}
            for place_here, rank in enumerate(range(size) if ranks is None else ranks)
        }
        if corpses:
            self._keeper = start_unreaped(list(environs.values()), words, programs.root, log, self._codes)
            return
        for rank, environ in environs.items():
            if hosts:
                command = [*hosts.on(hosts.names[rank]), sys.executable, *words]
                self._processes[rank] = _start_cold(command, environ, programs.root, log)
            else:
                self._processes[rank] = start(words, environ, programs.root, log)

    def await_file(self, path: Path) -> None:
        """Wait until one of them has made the file."""
        deadline = time.monotonic() + TIME_LIMIT
        while not path.exists():
            assert time.monotonic() < deadline and not any(map(_has_ended, self._processes.values())), self.output
            time.sleep(0.1)

    def ended(self, *ranks: int) -> list[int]:
        """The exit codes of ``ranks``, of all by default, once they have ended; then the others are killed."""
        if self._keeper:
            self._keeper.join(TIME_LIMIT)
            self._keeper.kill()  # and the ranks with it
            assert self._codes.exists(), f"ranks did not end:\n{self.output[-6000:]}"
            return json.loads(self._codes.read_text())
        chosen = [self._processes[rank] for rank in ranks or self._processes]
        deadline = time.monotonic() + TIME_LIMIT
        try:
            while not all(map(_has_ended, chosen)):
                assert time.monotonic() < deadline, f"ranks did not end:\n{self.output[-6000:]}"
                time.sleep(0.1)
            return [_exit_code(process) for process in chosen]
        finally:
            for process in self._processes.values():
                process.kill()
                _exit_code(process)

    @property
    def output(self) -> str:
        """What all ranks have said."""
        return self._log.read_text()

    @property
    def errors(self) -> list[str]:
        """The lines that the program says as errors."""
        begin = "pretrain_gpt2.py: error: "
        return [line.removeprefix(begin) for line in self.output.splitlines() if line.startswith(begin)]


def _start_cold(command: list[str], environ: dict[str, str], folder: Path, log: Path) -> subprocess.Popen:
    with open(log, "a") as file:
        return subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT)


def _has_ended(process: subprocess.Popen | BaseProcess) -> bool:
    """Without reaping the process, so that others can still read its exit status."""
    if isinstance(process, BaseProcess):
        return not process.is_alive()
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _exit_code(process: subprocess.Popen | BaseProcess) -> int:
    if isinstance(process, BaseProcess):
        process.join()
        return process.exitcode
    return process.wait()


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
