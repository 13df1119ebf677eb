"""Time until an elastic run over two hosts trains again: a rank is killed, and at last the link of a host is cut.

The hosts are network namespaces, as in the tests, which need Linux and root: two that train, and the supervisor's. What
remains after the ranks' own start-up (imports, rendezvous, model, checkpoint, first iteration) is held to 20 seconds.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.comparing import Quantity
from benchmarks.measures.faults import ROOT, START_LIMIT, TINY, _data
from megatron.common.errors import ConfigError, LaunchError
from megatron.tools.cluster.elastic import PHASES

sys.path.append(str(ROOT / "tests"))

from support.hosts import INTERFACE, Hosts, why_not  # noqa: E402

OWN_LIMIT = 20.0
MOST_ROUNDS = 3
"""Kills. The link is cut once."""
_START_UP = ("joined", "loaded", "trained")
"""Shares that are the ranks' own start-up."""


def measure(rounds: int) -> list[Quantity]:
    """Recovery after recovery of one run. Raises ConfigError where this machine cannot be several hosts."""
    if (reason := why_not()) is not None:
        raise ConfigError(f"recovery needs several hosts: {reason}")
    killed, cut = [], []
    with tempfile.TemporaryDirectory() as folder, Hosts(_made(Path(folder, "hosts")), 3) as hosts:
        run = _Run(Path(folder), hosts)
        try:
            run.await_iterations(3)
            for _ in range(min(rounds, MOST_ROUNDS)):
                killed.append(run.recovery(lambda: run.kill_rank("host-2")))
                run.await_iterations(2)
            cut.append(run.recovery(lambda: hosts.cut("host-2")))
        finally:
            run.close()
    return [*_told("SIGKILL of a rank", killed), *_told("link cut", cut)]


def _told(fault: str, found: list[dict[str, float]]) -> Iterator[Quantity]:
    whole = [sum(shares.values()) for shares in found]
    own = [sum(seconds for name, seconds in shares.items() if name not in _START_UP) for shares in found]
    limit = [OWN_LIMIT] * len(found)
    yield Quantity(f"{fault}: without the ranks' start-up", f"{OWN_LIMIT:g} s", own, limit, "s", most=1.0)
    yield Quantity(f"{fault}: until an iteration is trained again", "without the ranks' start-up", whole, own, "s")
    for name, what in {"noticed": "until it is noticed", **PHASES}.items():
        yield Quantity(f"{fault}: {what}", "the whole", [shares.get(name, 0.0) for shares in found], whole, "s")


class _Run:
    """An elastic run, whose supervisor is on a host that nothing happens to."""

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self._hosts, self._log, self._metrics = hosts, folder / "log", folder / "metrics"
        (folder / "hostfile").write_text("host-1 slots=1\nhost-2 slots=1\n")
        sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        (folder / "sent").write_text("".join(f"{name}={value}\n" for name, value in sent.items()))
        command = [
            *hosts.on("host-3"), sys.executable, "tools/launch.py", "--elastic", "--hostfile", str(folder / "hostfile"),
            "pretrain_gpt2.py", *TINY, *_data(folder), "--save", str(folder / "ck"), "--auto-resume",
            "--save-interval", "5", "--keep-last", "2", "--metrics-file", str(self._metrics),
        ]  # fmt: skip
        with open(self._log, "w") as log:
            self._supervisor = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "DS_ENV_FILE": str(folder / "sent")},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def recovery(self, strike: Callable[[], object]) -> dict[str, float]:
        """The shares of the recovery from ``strike()``, in seconds, by the event that ends each."""
        begin, told = time.monotonic(), len(self._told())
        strike()
        while len(self._told()) == told:
            self._check(begin)
        whole = time.monotonic() - begin
        seconds = [float(text) for text in re.findall(r"([\d.]+) s (?!after)", self._told()[-1])]
        shares = dict(zip(PHASES, seconds, strict=True))
        return {"noticed": max(whole - sum(seconds), 0.0), **shares}

    def await_iterations(self, more: int) -> None:
        """Wait until so many more iterations are trained."""
        begin, most = time.monotonic(), self._trained() + more
        while self._trained() < most:
            self._check(begin)

    def kill_rank(self, host: str) -> None:
        """SIGKILL to the rank on ``host``."""
        listed = subprocess.run(
            [*self._hosts.on(host), "pgrep", "-f", "--", "-u pretrain_gpt2.py"], capture_output=True, text=True
        ).stdout
        subprocess.run([*self._hosts.on(host), "kill", "-KILL", *listed.split()], check=True)

    def close(self) -> None:
        """End the supervisor; what it has started ends with its hosts."""
        if self._supervisor.poll() is None:
            os.killpg(self._supervisor.pid, signal.SIGKILL)
        self._supervisor.wait()

    def _check(self, begin: float) -> None:
        if self._supervisor.poll() is not None or time.monotonic() - begin > START_LIMIT:
            raise LaunchError(f"the run did not train on:\n{self._log.read_text()[-3000:]}")
        time.sleep(0.05)

    def _trained(self) -> int:
        return self._metrics.read_text().count("\n") if self._metrics.exists() else 0

    def _told(self) -> list[str]:
        return re.findall("elastic: (training again .*)", self._log.read_text())


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
