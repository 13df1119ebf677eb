"""An elastic run whose hosts are lost, cut off, stopped, out of disk space or wrong about the time, until it is done.

The hosts are network namespaces, see ``support/hosts.py``. The supervisor is on one more, which no fault hits.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.hosts import INTERFACE, Hosts
from support.programs import TINY_MODEL, Programs, read_metrics

from megatron.checkpoint.tracker import newest
from megatron.config.errors import CheckpointError
from megatron.tools.cluster.elastic_parts import STARTS

_SETTINGS = (
    *TINY_MODEL,
    *"--hidden-dropout 0 --attention-dropout 0 --global-batch-size 8 --batch-size 2 --eval-iters 0".split(),
    *"--zero-stage 1 --watchdog-minutes 1".split(),
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
    host: str
    seconds: float
    start: str
    """What the supervisor printed about the new start; empty if none was needed."""
    began: float = field(default_factory=time.time)
    """When the next iteration was trained, in seconds since 1970."""


@dataclass
class Outcome:
    """What a run has shown."""

    recoveries: list[Recovery] = field(default_factory=list)
    largest_difference: float = 0.0
    """Of a loss, from the same run without faults."""
    proof: str = ""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """What the supervisor has recorded, see ``elastic_parts.STARTS``."""


class ElasticVictim:
    """An elastic run over ``count`` hosts, one of them spare, in ``folder``."""

    def __init__(self, programs: Programs, folder: Path, count: int, iterations: int, chance: random.Random) -> None:
        self.programs, self.folder, self.chance = programs, folder, chance
        self.save, self.metrics, self.log = folder / "ck", folder / "metrics", folder / "log"
        for place in ("hosts", "ck", "site"):
            (folder / place).mkdir()
        self.hosts = Hosts(folder / "hosts", count + 1)
        self.names = self.hosts.names[:count]
        lines = [f"{name} slots=1\n" for name in self.names]
        (folder / "hostfile").write_text("".join(lines[:-1]) + lines[-1].replace("\n", " spare\n"))
        self.stages = min(count - 1, 4)
        self.settings = [*_SETTINGS, *programs.data_arguments, "--train-iters", str(iterations)]
        self._supervisor: subprocess.Popen | None = None
        self._clock, self.code = folder / "clock", 0
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
        """Start the supervisor."""
        command = [
            *self.hosts.on(self.hosts.names[-1]), sys.executable, "tools/launch.py", "--elastic", "--rejoin",
            "--exclude-after", "9", "--hostfile", str(self.folder / "hostfile"), "pretrain_gpt2.py", *self.settings,
            "--pipe-parallel-size", str(self.stages), "--metrics-file", str(self.metrics),
            "--save", str(self.save), "--auto-resume", "--save-interval", "1", "--keep-last", "3",
        ]  # fmt: skip
        environ = {**os.environ, "DS_ENV_FILE": str(self.folder / "sent")}
        with open(self.log, "a") as log:
            self._supervisor = subprocess.Popen(
                command,
                cwd=self.programs.root,
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the supervisor, if it runs."""
        if self._supervisor is not None and self._supervisor.poll() is None:
            os.killpg(self._supervisor.pid, signal.SIGKILL)
            self._supervisor.wait()

    def is_over(self) -> bool:
        """Whether the supervisor has ended."""
        assert self._supervisor is not None
        code = self._supervisor.poll()
        self.code = code or 0
        return code is not None

    def trained(self) -> int:
        """Lines of metrics."""
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def starts(self) -> list[str]:
        """What the supervisor printed about each start."""
        return re.findall(r"launch\.py: elastic: (\d+ ranks? on .*)", self.log.read_text())

    def in_use(self) -> list[str]:
        """The hosts of the present start."""
        return re.findall(r"host-\d+", re.split(", without|:", self.starts()[-1])[0])

    def await_training(self, lines: int) -> bool:
        """Wait until so many more iterations are trained; False if the supervisor has ended before."""
        most, deadline = self.trained() + lines, time.monotonic() + _TIME_LIMIT
        while self.trained() < most:
            if self.is_over():
                return False
            assert time.monotonic() < deadline, f"no training:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)
        return True

    def signal_rank(self, host: str, name: str) -> None:
        """Send a signal to every rank on a host."""
        listed = subprocess.run(
            [*self.hosts.on(host), "ps", "-eo", "pid,args"], capture_output=True, text=True, check=True
        ).stdout
        ranks = [
            line.split()[0] for line in listed.splitlines() if " pretrain_gpt2.py " in line and "launch" not in line
        ]
        if ranks:
            subprocess.run([*self.hosts.on(host), "kill", f"-{name}", *ranks])

    def fill_disk(self) -> Path:
        """A file that takes what is left of the checkpoints' disk."""
        filler = self.save / "filler"
        with open(filler, "wb") as file:
            try:
                while True:
                    file.write(b"\0" * (1 << 16))
                    file.flush()
            except OSError:
                return filler

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

    def jump_clock(self) -> None:
        """By up to a day, in either direction."""
        self._clock.write_text(str(self.chance.uniform(-86400, 86400)))


FAULTS = ("ranks killed", "host lost", "link cut", "ranks stopped", "disk full", "checkpoint damaged", "clock jump")


def torture_hosts(victim: ElasticVictim, faults: int, report: Callable[[Recovery], None]) -> Outcome:
    """So many faults, one after the other; then the run to its end, its losses and its proof."""
    outcome = Outcome()
    with victim.running():
        for number in range(faults):
            if not victim.await_training(2):
                break
            recovery = _hit(victim, FAULTS[number % len(FAULTS)])
            outcome.recoveries.append(recovery)
            report(recovery)
        deadline = time.monotonic() + _TIME_LIMIT
        while not victim.is_over():
            assert time.monotonic() < deadline, victim.log.read_text()[-4000:]
            time.sleep(0.2)
        assert victim.code == 0, victim.log.read_text()[-4000:]
        found = {line["iteration"]: line["lm_loss"] for line in read_metrics(victim.metrics)}
        outcome.starts = [json.loads(line) for line in (victim.save / STARTS).read_text().splitlines()]
        words = ("--load", str(victim.save), "--metrics-file", str(victim.metrics))
        outcome.proof = victim.programs.python("tools/audit_data.py", "proof", *words).ok().output.splitlines()[-1]
    whole = victim.folder / "whole"
    alone = ("--pipe-parallel-size", "1", "--metrics-file", whole)
    victim.programs.warm(1, "pretrain_gpt2.py", *victim.settings, *alone, time_limit=_TIME_LIMIT).ok()
    expected = {line["iteration"]: line["lm_loss"] for line in read_metrics(whole)}
    assert found.keys() == expected.keys()
    outcome.largest_difference = max(abs(found[step] - expected[step]) for step in expected)
    return outcome


def _hit(victim: ElasticVictim, fault: str) -> Recovery:
    """One fault, to the next iteration that is trained; afterwards everything is as before it."""
    host, begin, starts = victim.chance.choice(victim.in_use()), time.monotonic(), len(victim.starts())
    undo: Callable[[], object] = lambda: None  # noqa: E731
    if fault == "ranks killed":
        victim.signal_rank(host, "KILL")
    elif fault == "ranks stopped":
        victim.signal_rank(host, "STOP")
    elif fault == "host lost":
        victim.hosts.kill(host)
        undo = lambda: victim.hosts.start_again(host)  # noqa: E731
    elif fault == "link cut":
        victim.hosts.cut(host)
        undo = lambda: victim.hosts.cut(host, "up")  # noqa: E731
    elif fault == "disk full":
        undo = victim.fill_disk().unlink
    elif fault == "checkpoint damaged":
        victim.damage_newest()
        victim.signal_rank(host, "KILL")
    else:
        victim.jump_clock()
        victim.await_training(1)
        return Recovery(fault, host, time.monotonic() - begin, "")
    while len(victim.starts()) == starts and not victim.is_over():
        assert time.monotonic() < begin + _TIME_LIMIT, victim.log.read_text()[-4000:]
        time.sleep(0.05)
    if fault == "disk full":
        undo()
    if victim.is_over():
        assert victim.code in (0, 6, 7), victim.log.read_text()[-4000:]
        if victim.code:
            victim.start()
    victim.await_training(1)
    seconds = time.monotonic() - begin
    if fault != "disk full":
        undo()
    return Recovery(fault, host, seconds, victim.starts()[-1])


def draw(outcome: Outcome, file: Path) -> None:
    """A row for each host: when its ranks ran, the layout of each start, the faults, and until when they cost time."""
    from matplotlib.figure import Figure

    names = sorted({host for start in outcome.starts for host in start["hosts"]})
    zero = min(start["began"] for start in outcome.starts)
    figure = Figure(figsize=(10, 0.6 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    for start in outcome.starts:
        begin, end, layout = start["began"] - zero, start["ended"] - zero, start["layout"].split(",")[0]
        for host in start["hosts"]:
            axes.barh(names.index(host), end - begin, left=begin, height=0.6, color="#4c78a8", edgecolor="white")
        label = "as given" if "as given" in layout else layout
        axes.text(
            (begin + end) / 2, len(names) - 0.45, f"{label}\n{len(start['hosts'])} hosts", ha="center", fontsize=7
        )
    for recovery in outcome.recoveries:
        fault, again = recovery.began - recovery.seconds - zero, recovery.began - zero
        row = names.index(recovery.host)
        axes.axvspan(fault, again, color="#e45756", alpha=0.12, linewidth=0)
        axes.plot(fault, row, "x", color="#e45756", markersize=9, markeredgewidth=2.5)
        axes.text(fault, row - 0.45, f" {recovery.fault}", color="#b22222", fontsize=7, va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.7, len(names) + 0.1)
    axes.set_xlabel("seconds; shaded: from a fault to the next trained iteration")
    figure.savefig(file)
