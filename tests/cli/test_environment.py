"""What is read from the environment: world size, local rank, device and backend."""

import re
from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA, SMALL, parse

from megatron.cli import parse_run
from megatron.common.environment import adopt_slurm_task, expected_device, local_rank, ranks_on_host, world_size
from megatron.common.errors import ConfigError

MPIRUN = {name: "1" for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")}
MPIRUN |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    "environ, size, rank",
    [
        ({}, 1, None),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 8, 3),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 4, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, 2, 0),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, 4, None),
        ({"SLURM_NTASKS": "4"}, 1, None),
        ({**MPIRUN, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 8, 1),  # deepspeed --no_ssh
    ],
)
def test_variables_of_launchers(environ: dict[str, str], size: int, rank: int | None) -> None:
    assert (world_size(environ), local_rank(environ)) == (size, rank)
    assert rank is None or rank < (ranks_on_host(environ) or size)


TASK = {
    **{"SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "20", "SLURM_PROCID": "17", "SLURM_LOCALID": "1"},
    **{"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_STEP_NODELIST": "gpu[07,09-10]"},
}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[07,09-10]", "gpu07"), ("a,b,c", "a"), ("r1-n[01-03]-ib,x", "r1-n01-ib"), ("n[1-2]x[3-4]", "n1x3")],
)
def test_a_task_of_srun_is_a_rank(nodes: str, first: str) -> None:
    environ = {**TASK, "SLURM_STEP_NODELIST": nodes, "PMIX_RANK": "17"}
    adopt_slurm_task(environ)
    assert {name: value for name, value in environ.items() if name not in TASK} == {
        **{"RANK": "17", "LOCAL_RANK": "1", "WORLD_SIZE": "20", "LOCAL_WORLD_SIZE": "4", "PMIX_RANK": "17"},
        **{"MASTER_ADDR": first, "MASTER_PORT": "20071"},
    }


@pytest.mark.parametrize(
    "own",
    [
        {"RANK": "3"},  # torchrun or deepspeed, started by srun
        {"OMPI_COMM_WORLD_RANK": "3"},  # mpirun, whose daemons srun has started
        {"SLURM_NTASKS": "1"},  # a shell
    ],
)
def test_what_srun_started_may_be_a_launcher(own: dict[str, str]) -> None:
    environ = {**TASK, **own}
    adopt_slurm_task(environ)
    assert environ == {**TASK, **own}
    shell = {**TASK, "SLURM_PTY_PORT": "33517"}  # of srun --pty in an allocation for several tasks
    adopt_slurm_task(shell)
    assert "RANK" not in shell and world_size(shell) == 1
    script = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}  # a batch script
    adopt_slurm_task(script)
    assert "RANK" not in script


@pytest.mark.parametrize("name", ["SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", "SLURM_JOB_ID"])
def test_half_a_task_is_refused(name: str) -> None:
    environ = {key: value for key, value in TASK.items() if key != name}
    for given in (environ, {**TASK, name: "x"} if name != "SLURM_LOCALID" else environ):
        with pytest.raises(ConfigError, match="not as srun sets it .*: start with srun, or unset SLURM_STEP_ID"):
            adopt_slurm_task(given)
        assert "RANK" not in given


@pytest.mark.parametrize(("name", "value"), [("SLURM_NODEID", "-1"), ("SLURM_STEP_TASKS_PER_NODE", "8(x99999999999)")])
def test_an_impossible_task_is_refused_at_once(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"host .*{re.escape(value)}.*: start with srun"):
        adopt_slurm_task({**TASK, name: value})


def test_an_address_that_is_given_stays() -> None:
    environ = {**TASK, "PMI_RANK": "17", "PMI_SIZE": "20", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    adopt_slurm_task(environ)
    assert [environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT")] == ["17", "10.0.0.1", "5000"]


@pytest.mark.parametrize("value", ["0", "-1", "two", ""])
def test_a_wrong_world_size_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"environment variable WORLD_SIZE={value}: set a whole number from 1 on"):
        parse_run(SMALL.split(), {**CPU, "WORLD_SIZE": value})


def test_the_device_is_detected_without_torch(tmp_path: Path) -> None:
    assert expected_device({}, tmp_path) == "cpu"
    (tmp_path / "nvidiactl").touch()  # a container may have it without a GPU
    assert expected_device({}, tmp_path) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert expected_device({}, tmp_path) == "cuda"
    assert expected_device({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path) == "cuda"
    assert expected_device({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == "cpu"
    assert expected_device({"DS_ACCELERATOR": "cpu"}, tmp_path) == "cpu"


def test_nvidias_gpus_are_detected_under_wsl2(tmp_path: Path) -> None:
    (tmp_path / "dxg").touch()  # also there with GPUs of other makers alone
    assert expected_device({}, tmp_path, [tmp_path]) == "cpu"
    (tmp_path / "libcuda.so.1").touch()
    assert expected_device({}, tmp_path, [tmp_path]) == "cuda"
    assert expected_device({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path, [tmp_path]) == "cpu"


@pytest.mark.parametrize("environ, backend", [(CPU, "gloo"), (CUDA, "nccl")])
def test_the_backend_follows_the_device(environ: dict[str, str], backend: str) -> None:
    assert parse(environ=environ).parallel.distributed_backend == backend
