"""Two and three hosts, each launcher: the losses of one host, bit for bit.

The hosts are network namespaces, see ``support/hosts.py``; they share the data, as over NFS, and nothing else.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import INTERFACE, Hosts, why_not
from support.programs import BIN, TINY_MODEL, Programs, read_metrics

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

LAYOUT = "--model-parallel-size 2 --pipe-parallel-size 2".split()
SETTINGS = "--train-iters 2 --batch-size 2 --global-batch-size 4 --eval-iters 0".split()
FORWARDED = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
"""What every process is to find in its environment."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    """Three of them, and a ``.deepspeed_env``."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in FORWARDED.items()))
    with Hosts(folder, 3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def arguments(programs: Programs) -> list[str]:
    return ["pretrain_gpt2.py", *TINY_MODEL, *SETTINGS, *LAYOUT, *programs.data_arguments]


@pytest.fixture(scope="module")
def on_one_host(programs: Programs, arguments, tmp_path_factory) -> list[float]:
    """The losses of four ranks on this machine."""
    metrics = tmp_path_factory.mktemp("one_host") / "metrics"
    programs.torchrun(4, *arguments, "--metrics-file", metrics).ok()
    return losses(metrics)


def losses(metrics: Path) -> list[float]:
    found = [line["lm_loss"] for line in read_metrics(metrics) if "lm_loss" in line]
    assert len(found) == 2
    return found


def deepspeed(hosts: Hosts, *words: str | Path) -> list[str | Path]:
    """``deepspeed`` on the first host, for two slots on each of two."""
    hostfile = hosts.hostfile(2, ["host-1", "host-2"])
    return [*hosts.on("host-1"), "deepspeed", "--log_level", "warning", "--hostfile", hostfile, *words]


def mpi_words(hosts: Hosts) -> list[str]:
    return ["--mca", "btl_tcp_if_include", INTERFACE, "--prefix", str(BIN.parent)]


def test_deepspeed_over_pdsh(programs, hosts, arguments, on_one_host, tmp_path) -> None:
    metrics = tmp_path / "metrics"
    command = [*deepspeed(hosts), *arguments, "--metrics-file", metrics]
    finished = programs.run(*command, DS_ENV_FILE=str(hosts.folder / "deepspeed_env")).ok()
    assert losses(metrics) == on_one_host
    assert finished.output.count("host-1: > layout") == 1 and "host-2: >" not in finished.output
