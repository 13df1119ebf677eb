"""Two hosts, each launcher: the losses of one host, bit for bit. Three hosts are in test_elastic_hosts.py.

The hosts are network namespaces, see ``support/hosts.py``; they share their files, as over NFS.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.hosts import INTERFACE, Hosts, why_not
from support.programs import TINY_MODEL, Finished, Programs, read_metrics

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
"""What every rank is to find, wherever it is."""
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SCRIPT = ("env", "MERGES=", "bash", "examples/ds_pretrain_gpt2_multinode.sh")
SETTINGS = (
    "--pipe-parallel-size 2 --train-iters 2 --batch-size 2 --global-batch-size 4 --eval-iters 0"
    " --zero-stage 1 --checkpoint-activations --clip-grad 1 --weight-decay 0.01"
).split()
"""Whatever the script says, too."""
TP1 = ("--model-parallel-size", "1")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in ENVIRONMENT.items()))
    with Hosts(folder, 2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def settings(programs: Programs) -> list[str]:
    return [*TINY_MODEL, *SETTINGS, *programs.data_arguments]


@pytest.fixture(scope="module")
def on_one_host(train_in_ranks, tmp_path_factory) -> list[float]:
    """The losses of two ranks on this machine."""
    metrics = tmp_path_factory.mktemp("one_host") / "metrics"
    train_in_ranks(2, *SETTINGS, *TP1, "--metrics-file", metrics)
    return losses(metrics)


def losses(metrics: Path) -> list[float]:
    found = [line["lm_loss"] for line in read_metrics(metrics) if "lm_loss" in line]
    assert len(found) == 2
    return found


def on_each(programs: Programs, hosts: Hosts, *commands: list, **environ: str) -> list[Finished]:
    """One command on ``host-1``, the next on ``host-2``, ..., all at the same time."""
    with ThreadPoolExecutor() as pool:
        started = [
            pool.submit(programs.run, *hosts.on(name), *command, **ENVIRONMENT, **environ)
            for name, command in zip(hosts.names, commands, strict=False)
        ]
        return [finished.result().ok() for finished in started]


def test_launch_py_over_pdsh(programs, hosts, warm_python, settings, train_in_ranks, tmp_path) -> None:
    """Three stages on two hosts, two of them on the first."""
    stages = ("--pipe-parallel-size", "3")
    train_in_ranks(3, *SETTINGS, *stages, "--metrics-file", tmp_path / "one_host")
    files = {"HOSTFILE": str(hosts.hostfile(2, 2)), "SAVE": str(tmp_path / "saved")}
    finished = programs.run(
        *hosts.on("host-1"), *SCRIPT, *settings, *TP1, *stages, "--metrics-file", tmp_path / "metrics",
        DS_ENV_FILE=str(hosts.folder / "deepspeed_env"), LAUNCHER="pdsh", INCLUDE="host-1:0,1@host-2:1",
        **files, **warm_python,
    ).ok()  # fmt: skip
    assert losses(tmp_path / "metrics") == losses(tmp_path / "one_host")
    assert finished.output.count("> layout") == 1, "one rank of all hosts prints"
    assert (tmp_path / "saved" / "latest").read_text() == "global_step2"


def test_launch_py_with_open_mpi(programs, hosts, settings, on_one_host, tmp_path) -> None:
    variables = {"LAUNCHER": "openmpi", "INTERFACE": INTERFACE, "HOSTFILE": str(hosts.hostfile(1, 2)), **AS_ROOT}
    programs.run(
        *hosts.on("host-1"), *SCRIPT, *settings, *TP1, "--metrics-file", tmp_path / "metrics",
        DS_ENV_FILE=str(hosts.folder / "deepspeed_env"), SAVE=str(tmp_path / "saved"), **variables,
    ).ok()  # fmt: skip
    assert losses(tmp_path / "metrics") == on_one_host


def test_launch_py_without_ssh(programs, hosts, warm_python, settings, on_one_host, tmp_path) -> None:
    """Started once on each host."""
    files = {"HOSTFILE": str(hosts.hostfile(1, 2)), "SAVE": str(tmp_path / "saved"), "MASTER_ADDR": "host-1"}
    commands = [
        ["env", f"NODE_RANK={number}", *SCRIPT, *settings, *TP1, "--metrics-file", tmp_path / "metrics"]
        for number in range(2)
    ]
    on_each(programs, hosts, *commands, **files, **warm_python)
    assert losses(tmp_path / "metrics") == on_one_host


def test_deepspeed_over_pdsh(programs, hosts, warm_python, settings, on_one_host, tmp_path) -> None:
    """The command itself, without tools/launch.py."""
    command = ("deepspeed", "--hostfile", hosts.hostfile(1, 2), "pretrain_gpt2.py", *settings)
    environ = {"DS_ENV_FILE": str(hosts.folder / "deepspeed_env"), **warm_python}
    programs.run(*hosts.on("host-1"), *command, "--metrics-file", tmp_path / "metrics", **environ).ok()
    assert losses(tmp_path / "metrics") == on_one_host


@pytest.mark.parametrize("place", [{"LAUNCHER": "pdsh"}, {"NODE_RANK": "0", "MASTER_ADDR": "host-1"}])
def test_the_error_of_a_rank_is_all_that_is_printed(programs, hosts, warm_python, place, tmp_path) -> None:
    """DeepSpeed's launchers add no lines, which would repeat the whole command."""
    files = {"HOSTFILE": str(hosts.hostfile(1, 2)), "SAVE": str(tmp_path / "saved"), **place}
    environ = {"DS_ENV_FILE": str(hosts.folder / "deepspeed_env"), **ENVIRONMENT, **warm_python}
    command = (*SCRIPT, "--hidden-size", "33", "--num-attention-heads", "4")
    ended = programs.run(*hosts.on("host-1"), *command, **files, **environ)
    lines = re.sub("^host-[12]: ", "", ended.output, flags=re.MULTILINE).splitlines()
    assert ended.returncode == 2 and any("--hidden-size 33 is not a multiple" in line for line in lines), ended.output
    assert all(line.startswith("pretrain_gpt2.py: error: ") for line in lines), ended.output


def test_torchrun_with_a_rendezvous(programs, hosts, settings, on_one_host, tmp_path) -> None:
    command = [
        "torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d",
        "--rdzv_endpoint", "host-1:29500", "--rdzv_id", "run-1",
        "pretrain_gpt2.py", *settings, "--metrics-file", tmp_path / "metrics",
    ]  # fmt: skip
    on_each(programs, hosts, command, command)
    assert losses(tmp_path / "metrics") == on_one_host
