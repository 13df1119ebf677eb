"""An elastic run whose hosts are lost, cut off, stopped, out of disk space or wrong about the time, until it is done.

The hosts are network namespaces, see ``support/hosts.py``. The elastic agent is on one more, which no fault hits.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from support.hosts import INTERFACE, Hosts
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.checkpoint.tracker import newest
from megatron.common.errors import CheckpointError

_SETTINGS = (
    *TINY_MODEL,
    *"--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --batch-size 2 --eval-iters 0".split(),
    *"--zero-stage 1 --watchdog-minutes 0.2 --distributed-timeout-minutes 1".split(),
)
_DISK = "48m"
_TIME_LIMIT = 600.0
_CLOCK = """
import os, time
_time = time.time
def jumped():
    try:
        return _time() + float(open({file!r}).read() or 0)
    except (OSError, ValueError):
        return _time()
time.time = jumped
"""
"""For ``sitecustomize.py``: ranks see a clock that jumps when the file changes."""


@dataclass
class Recovery:
    """A fault, and how long after it the next iteration was trained."""

    fault: str
    instant: str
    hosts: list[str]
    seconds: float
    start: str
    """What the agent printed about the new start; empty if none was needed."""
    shares: str
    """What it printed about the time that the recovery took."""
    new_agent: bool
    """Whether the run had ended, and was started again as a scheduler would."""


@dataclass
class Outcome:
    """What a run has shown."""

    recoveries: list[Recovery] = field(default_factory=list)
    largest_difference: float = 0.0
    """Of a loss, from the same run without faults."""
    iterations: int = 0
    proof: str = ""
    code: int = 0
    """With which the agent has ended after the last fault."""


class ElasticVictim:
    """An elastic run over ``count`` hosts, one of them spare, in ``folder``."""

    def __init__(
        self, programs: Programs, folder: Path, count: int, iterations: int, chance: random.Random, snapshots: bool
    ) -> None:
        self.programs, self.folder, self.chance = programs, folder, chance
        self.save, self.metrics, self.log = folder / "ck", folder / "metrics", folder / "log"
        for place in ("hosts", "ck", "site"):
            (folder / place).mkdir()
        self.hosts = Hosts(folder / "hosts", count + 1)
        self.names = self.hosts.names[:count]
        """The hosts of ranks; the agent is on the last one."""
        lines = [f"{name} slots=1\n" for name in self.names]
        (folder / "hostfile").write_text("".join(lines[:-1]) + lines[-1].replace("\n", " spare\n"))
        self.stages = min(count - 1, 4)
        self.saves = "--save-interval 10 --snapshot-interval 1" if snapshots else "--save-interval 1"
        self.settings = [*_SETTINGS, *programs.data_arguments, "--train-iters", str(iterations)]
        self._agent: subprocess.Popen | None = None
        self._clock, self.filler, self.code = folder / "clock", self.save / "filler", 0
        (folder / "site" / "sitecustomize.py").write_text(_CLOCK.format(file=str(self._clock)))
        sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        sent["PYTHONPATH"] = str(folder / "site")
        (folder / "sent").write_text("".join(f"{name}={value}\n" for name, value in sent.items()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hosts and a small disk for the checkpoints, both gone at the end."""
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "none", str(self.save)], check=True)
        try:
            with self.hosts:
                try:
                    self.start()
                    yield
                finally:
                    self.stop()
        finally:
            subprocess.run(["umount", "-l", str(self.save)], check=True)

    def start(self) -> None:
        """Start the elastic agent."""
        command = [
            *self.hosts.on(self.hosts.names[-1]), sys.executable, "tools/launch.py", "--elastic", "--rejoin",
            "--min-hosts", "2", "--exclude-after", "9", "--hostfile", str(self.folder / "hostfile"),
            "pretrain_gpt2.py", *self.settings,
            "--pipe-parallel-size", str(self.stages), "--metrics-file", str(self.metrics),
            "--save", str(self.save), "--auto-resume", *self.saves.split(), "--keep-last", "3",
        ]  # fmt: skip
        environ = {**os.environ, "DS_ENV_FILE": str(self.folder / "sent")}
        with open(self.log, "a") as log:
            self._agent = subprocess.Popen(
                command,
                cwd=self.programs.root,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the agent if it runs."""
        if self._agent is not None and self._agent.poll() is None:
            os.killpg(self._agent.pid, signal.SIGKILL)
            self._agent.wait()

    def is_over(self) -> bool:
        """Whether the agent has ended."""
        assert self._agent is not None
        code = self._agent.poll()
        self.code = code or 0
        return code is not None

    def trained(self) -> int:
        """Lines of metrics."""
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def starts(self) -> list[str]:
        """What the agent printed about each start."""
        return re.findall(r"launch\.py: elastic: (\d+ ranks? on .*)", self.log.read_text())

    def shares(self) -> list[str]:
        """What the agent printed about each recovery."""
        return re.findall(r"launch\.py: elastic: (training again .*)", self.log.read_text())

    def in_use(self) -> list[str]:
        """The hosts of the present start."""
        return re.findall(r"host-\d+", re.split(", without|:", self.starts()[-1])[0])

    def await_training(self, lines: int) -> bool:
        """Wait until so many more iterations are trained; False if the agent has ended before."""
        most, deadline = self.trained() + lines, time.monotonic() + _TIME_LIMIT
        while self.trained() < most:
            if self.is_over():
                return False
            self.check_time(deadline)
            time.sleep(0.05)
        return True

    def must_train(self, lines: int) -> None:
        """The same; raises AssertionError if the agent has ended before."""
        assert self.await_training(lines), f"ended with {self.code}:\n{self.log.read_text()[-6000:]}"

    def await_start(self, starts: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until there are more than so many starts, or the agent has ended."""
        deadline = time.monotonic() + _TIME_LIMIT
        while len(self.starts()) <= starts and not self.is_over():
            meanwhile()
            self.check_time(deadline)
            time.sleep(0.05)

    def await_save(self) -> None:
        """Wait until a checkpoint is being written, for a few seconds at most: it is soon over."""
        deadline = time.monotonic() + 5
        while not list(self.save.glob("*.partial")) and time.monotonic() < deadline:
            time.sleep(0.001)

    def check_time(self, deadline: float) -> None:
        """Raises AssertionError after ``deadline``."""
        assert time.monotonic() < deadline, f"no training:\n{self.log.read_text()[-6000:]}"

    def end(self) -> None:
        """SIGTERM to the agent, as a scheduler sends it; the run saves and ends, with code 75."""
        assert self._agent is not None
        if not self.is_over():
            for process in psutil.Process(self._agent.pid).children():  # that one is nsenter
                process.terminate()
        self.code = self._agent.wait(_TIME_LIMIT)

    def signal_rank(self, host: str, name: str) -> None:
        """Send a signal to every rank on a host, once there is one."""
        ranks, deadline = self._ranks_on(host), time.monotonic() + 30
        while not ranks and time.monotonic() < deadline and not self.is_over():
            time.sleep(0.05)
            ranks = self._ranks_on(host)
        if ranks:
            subprocess.run([*self.hosts.on(host), "kill", f"-{name}", *ranks])

    def _ranks_on(self, host: str) -> list[str]:
        command = [*self.hosts.on(host), "ps", "-ww", "-eo", "pid,args"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line.split()[0] for line in listed if " pretrain_gpt2.py " in line and "launch" not in line]

    def fill_disk(self) -> None:
        """Let a file take what is left of the checkpoints' disk."""
        with suppress(OSError), open(self.filler, "ab", buffering=0) as file:
            while True:
                file.write(b"\0" * (1 << 16))

    def damage_newest(self) -> None:
        """Change a byte of the largest file of the newest checkpoint."""
        try:
            files = [path for path in newest(self.save).path.rglob("*") if path.is_file()]
            largest = max(files, key=lambda path: path.stat().st_size)
            with open(largest, "r+b") as file:
                file.seek(largest.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
        except (CheckpointError, OSError):
            pass  # it was removed meanwhile

    def strike(self, fault: str, host: str) -> Callable[[], object]:
        """A fault of ``host``. Returns what makes it good."""
        if fault == "host lost":
            self.hosts.kill(host)
            return lambda: self.hosts.start_again(host)
        if fault == "link cut":
            self.hosts.cut(host)
            return lambda: self.hosts.cut(host, "up")
        self.signal_rank(host, "STOP" if fault == "ranks stopped" else "KILL")
        return lambda: None

    def jump_clock(self) -> None:
        """By up to a day, in either direction."""
        self._clock.write_text(str(self.chance.uniform(-86400, 86400)))


FAULTS = ("ranks killed", "host lost", "link cut", "ranks stopped", "disk full", "checkpoint damaged", "clock jump")
INSTANTS = ("at any time", "while saving", "while restarting", "two hosts at once")


def torture_hosts(
    victim: ElasticVictim,
    faults: int,
    report: Callable[[Recovery], None],
    is_stopped: Callable[[], bool],
) -> Outcome:
    """So many faults, one after the other, or fewer if it ``is_stopped``, which it is between two of them only.

    Then the end of the run, its losses and proof.
    """
    outcome = Outcome()
    with victim.running():
        for number in range(faults):
            victim.must_train(2)
            if is_stopped():
                break
            instant = INSTANTS[number // len(FAULTS) % len(INSTANTS)]
            outcome.recoveries.append(_hit(victim, FAULTS[number % len(FAULTS)], instant))
            report(outcome.recoveries[-1])
        victim.must_train(1)
        victim.end()
        outcome.code = victim.code
        found = {line["iteration"]: line["lm_loss"] for line in read_metrics(victim.metrics)}
        words = ("--load", str(victim.save), "--metrics-file", str(victim.metrics))
        outcome.proof = victim.programs.python("tools/audit_data.py", "proof", *words).ok().output.splitlines()[-1]
    whole, last = victim.folder / "whole", max(found)
    alone = ("--pipe-parallel-size", "1", "--metrics-file", whole, "--exit-interval", str(last))
    victim.programs.warm(1, "pretrain_gpt2.py", *victim.settings, *alone, time_limit=_TIME_LIMIT + last).ok()
    expected = {line["iteration"]: line["lm_loss"] for line in read_metrics(whole)}
    assert found.keys() == expected.keys()
    outcome.iterations = last
    outcome.largest_difference = max(abs(found[step] - expected[step]) for step in expected)
    return outcome


def _hit(victim: ElasticVictim, fault: str, instant: str) -> Recovery:
    """One fault, to the next iteration that is trained; afterwards everything is as before it."""
    if instant == "while restarting":
        starts = len(victim.starts())
        victim.signal_rank(victim.chance.choice(victim.in_use()), "KILL")
        victim.await_start(starts)
        time.sleep(victim.chance.uniform(0, 6))
    elif instant == "while saving":
        victim.await_save()
    else:
        time.sleep(victim.chance.uniform(0, 0.5))
    begin, starts, told, hosts = time.monotonic(), len(victim.starts()), len(victim.shares()), victim.in_use()
    chosen = victim.chance.sample(hosts, min(len(hosts), 2 if instant == "two hosts at once" else 1))
    undo: list[Callable[[], object]] = []
    if fault == "clock jump":
        victim.jump_clock()
    elif fault == "disk full":
        victim.await_start(starts, victim.fill_disk)  # again and again: the run deletes old checkpoints
        victim.filler.unlink(missing_ok=True)
    else:
        if fault == "checkpoint damaged":
            victim.damage_newest()
        undo = [victim.strike(fault, host) for host in chosen]
        victim.await_start(starts)
    is_over = victim.is_over() or not victim.await_training(1)
    if is_over:  # as a scheduler would, once the hosts are there again
        assert victim.code, "the run was over before its last fault: it needs more --iterations"
        assert victim.code in (6, 7), f"{victim.code}:\n{victim.log.read_text()[-6000:]}"
        while undo:
            undo.pop()()
        while victim.code in (6, 7) and time.monotonic() < begin + _TIME_LIMIT:
            victim.start()
            if victim.await_training(1):
                break
    seconds = time.monotonic() - begin
    for step in undo:
        step()
    time.sleep(0.5)  # until the agent has printed what it took
    again, shares = victim.starts()[starts:], victim.shares()[told:]
    return Recovery(fault, instant, chosen, seconds, " | ".join(again), shares[-1] if shares else "", is_over)
