"""A run over two hosts: listening sockets, a cut link. A lost host is in test_elastic_hosts.py.

The hosts are network namespaces, see ``support/hosts.py``; they share their files, as over NFS.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.bare_ranks import BareRanks
from support.hosts import INTERFACE, Hosts, why_not
from support.programs import TINY_MODEL, Finished, Programs, read_metrics
from support.training import RankTraining, pretrain

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SETTINGS = "--train-iters 4 --batch-size 2 --gas 4 --eval-iters 0 --pipe-parallel-size 2".split()
SAVES = "--save-interval 1 --auto-resume".split()
SSHD = "22"
Launch = Callable[..., Finished]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def whole(train_in_ranks, tmp_path_factory) -> list[float]:
    """Losses of an undisturbed run."""
    metrics = tmp_path_factory.mktemp("whole") / "metrics"
    train_in_ranks(2, *SETTINGS, "--metrics-file", metrics)
    return losses(metrics)


def losses(metrics: Path) -> list[float]:
    """Of each iteration the last: one that was finished when a rank was lost is trained, and logged, once more."""
    return list({line["iteration"]: line["lm_loss"] for line in read_metrics(metrics)}.values())


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [*SETTINGS, *SAVES, "--save", str(tmp_path / "ck"), "--metrics-file", str(tmp_path / "metrics")]


@pytest.fixture
def launch(programs: Programs, hosts: Hosts, warm_python, words: list[str], tmp_path: Path) -> Launch:
    """``launch(fault, flags, *more)``: over pdsh, a rank on each host; ``flags`` are the launcher's."""

    def run(fault: str, flags: tuple[str, ...], *more: str) -> Finished:
        sent = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "FAULT": fault}
        (tmp_path / "sent").write_text("".join(f"{name}={value}\n" for name, value in sent.items()))
        return programs.run(
            *hosts.on("host-1"), sys.executable, "tools/launch.py", "--hostfile", hosts.hostfile(1, 2), *flags,
            "tests/support/faulty_pretrain.py", *TINY_MODEL, *programs.data_arguments, *words, *more,
            DS_ENV_FILE=str(tmp_path / "sent"), PDSH_SSH_ARGS_APPEND="-o ServerAliveInterval=2", **warm_python,
        )  # fmt: skip

    return run


def pretrain_soon(words: list[str]) -> tuple[int, str]:
    """``pretrain_gpt2.py`` that waits for a second, and not for a minute, whether a run of another host still saves."""
    from megatron.checkpoint import folder_lock

    folder_lock.LEASE_SECONDS = 1.0
    return pretrain(words)


def test_a_cut_link_is_reported_on_both_sides_and_the_run_resumes(
    programs, hosts, launch, run_ranks_once, words, whole, tmp_path
) -> None:
    ended = launch(f"command 1 3 ip link set {INTERFACE} down", (), "--watchdog-minutes", "0.1")
    assert ended.returncode not in (0, 1), ended.output
    (cause,) = re.findall("error: rank .* is hung.*", ended.output)
    assert cause.startswith("error: rank 1 is hung and does not respond, last seen: "), ended.output
    assert cause.endswith("(on host-2)"), "where it is to be looked for"
    hosts.await_end("host-2", str(tmp_path))
    assert (tmp_path / "ck" / "hang-rank1.txt").read_text().startswith("rank 1, process ")
    subprocess.run([*hosts.on("host-2"), "ip", "link", "set", INTERFACE, "up"], check=True)
    RankTraining(run_ranks_once, programs.data_arguments, pretrain_soon)(2, *words)
    assert losses(tmp_path / "metrics") == whole


KILLED = "signal 1 3 SIGKILL"
"""The second host's rank; a start that resumes after iteration 2 does not reach its third iteration."""


def test_a_run_over_pdsh_is_restarted(launch, whole, tmp_path) -> None:
    ended = launch(KILLED, ("--max-restarts", "3")).ok()
    (line,) = re.findall("launch.py: error: the run failed with exit code .*", ended.output)
    assert line.endswith(": restart 1 of 3 (--max-restarts)") and losses(tmp_path / "metrics") == whole


def test_torchrun_restarts_a_run_on_both_hosts(programs, hosts, words, whole, tmp_path) -> None:
    command = ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "3", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", "host-1:29500", "--rdzv_id", "run-1", "tests/support/faulty_pretrain.py"]
    command += [*TINY_MODEL, *programs.data_arguments, *words]
    environ = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "FAULT": KILLED}
    with ThreadPoolExecutor() as pool:
        started = [pool.submit(programs.run, *hosts.on(name), *command, **environ) for name in hosts.names]
        outputs = [finished.result().ok().output for finished in started]
    assert "exitcode: -9" in outputs[1] and losses(tmp_path / "metrics") == whole


def test_ranks_listen_at_the_given_address_only(programs, hosts, tmp_path) -> None:
    ready, seen = tmp_path / "ready", tmp_path / "seen"
    wait = f"touch {ready}; until [ -e {seen} ]; do sleep 0.1; done"
    ranks = BareRanks(programs, tmp_path / "log", f"command 0 2 {wait}", *SETTINGS, size=2, hosts=hosts)
    ranks.await_file(ready)
    found = {name: listening_sockets(hosts, name) for name in hosts.names}
    seen.touch()
    assert ranks.ended() == [0, 0], ranks.output
    assert {name: {address for address, _ in found[name]} for name in found} == {
        name: {hosts.address(name)} for name in hosts.names
    }
    assert len(found["host-1"]) > len(found["host-2"]) > 0, "rank 0 hosts the store"


def test_run_on_one_host_listens_on_loopback_only(programs, tmp_path) -> None:
    """Nor is anything kept in shared memory, which would outlive it."""
    ranks = f"pgrep -P $(ps -o ppid= -p $PPID) > {tmp_path}/ranks"
    fault = f"command 0 2 {ranks}; ss -Hltnp > {tmp_path}/sockets; ls /dev/shm > {tmp_path}/shared"
    programs.faulty(2, fault, *SETTINGS).ok()
    own = [f"pid={number}," for number in (tmp_path / "ranks").read_text().split()]
    lines = (tmp_path / "sockets").read_text().splitlines(keepends=True)
    found = parse("".join(line for line in lines if any(pid in line for pid in own)))
    assert len(own) == 2 and len(found) > 2 and {address for address, _ in found} == {"127.0.0.1"}
    assert "deepspeed" not in (tmp_path / "shared").read_text()


def listening_sockets(hosts: Hosts, name: str) -> set[tuple[str, str]]:
    """Address and port of each socket that listens on a host, but for its sshd."""
    command = [*hosts.on(name), "ss", "-Hltn"]
    return parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parse(output: str) -> set[tuple[str, str]]:
    places = re.findall(r"^LISTEN +\d+ +\d+ +(\S+):(\d+) ", output, re.MULTILINE)
    return {(address, port) for address, port in places if port != SSHD}
