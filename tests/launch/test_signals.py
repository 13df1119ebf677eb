"""Signals to ``tools/launch.py`` whose ranks are on two hosts: they save, or end with it; with it alone over ssh.

The hosts are network namespaces, see ``support/hosts.py``; they share their files, as over NFS.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from support.hosts import INTERFACE, Hosts, why_not
from support.programs import TINY_MODEL, Programs

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SETTINGS = "--train-iters 100000 --batch-size 2 --gas 4 --eval-iters 0 --pipe-parallel-size 2 --log-interval 1".split()
Started = Callable[..., AbstractContextManager[subprocess.Popen]]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 3) as hosts:
        yield hosts


@pytest.fixture
def started(programs: Programs, hosts: Hosts, warm_python, tmp_path: Path) -> Started:
    """``started(fault, words)``: launch.py on ``host-3``, a rank on each other host, over pdsh; in iteration 3."""

    @contextmanager
    def start(fault: str, *words: object) -> Iterator[subprocess.Popen]:
        sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "FAULT": fault}
        (tmp_path / "sent").write_text("".join(f"{name}={value}\n" for name, value in sent.items()))
        command = [*hosts.on("host-3"), sys.executable, "tools/launch.py", "--hostfile", hosts.hostfile(1, 2)]
        command += ["tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments, *SETTINGS]
        log = tmp_path / "log"
        environ = {"DS_ENV_FILE": str(tmp_path / "sent"), **warm_python}
        with programs.started(log, *command, "--metrics-file", tmp_path / "metrics", *words, **environ) as process:
            await_text(log, "iteration      2/", process)
            yield process

    return start


def launcher(process: subprocess.Popen) -> psutil.Process:
    """launch.py itself, below the program that has entered the host."""
    return psutil.Process(process.pid).children()[0]


def await_text(log: Path, text: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 240
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "save", "code"), [(signal.SIGUSR1, True, 75), (signal.SIGINT, False, 130)])
def test_the_ranks_of_all_hosts_save_after_a_signal(hosts, started, tmp_path, number, save, code) -> None:
    """The iteration, which takes three seconds more, is finished, and what the ranks say then is printed."""
    with started("command 1 3 sleep 3", *(("--save", tmp_path / "ck") if save else ())) as process:
        launcher(process).send_signal(number)
        assert process.wait(timeout=240) == code, (tmp_path / "log").read_text()
    assert re.search(r"host-1: exiting after iteration \d+: received SIGTERM", (tmp_path / "log").read_text())
    if save:
        (tag,) = (tmp_path / "ck").glob("global_step*")
        assert (tag / "manifest.json").exists() and (tmp_path / "ck" / "latest").read_text() == tag.name
    for name in ("host-1", "host-2"):
        hosts.await_end(name, str(tmp_path))


@pytest.mark.parametrize(
    ("signals", "code"),
    [("SIGTERM SIGINT", 130), ("SIGKILL", -9)],
)
def test_ranks_end_with_their_launcher(hosts, started, tmp_path, signals, code) -> None:
    """At once after a second signal, or one that it cannot receive, even if a rank hangs."""
    with started("sleep 1 3", "--save", tmp_path / "ck") as process:
        for name in signals.split():
            launcher(process).send_signal(getattr(signal, name))
            time.sleep(2)
        assert process.wait(timeout=60) == code
        for name in ("host-1", "host-2"):
            hosts.await_end(name, str(tmp_path))
