"""What is read from the environment: world size, local rank, device and backend."""

from pathlib import Path

import pytest
from support.command_lines import CPU, CUDA, SMALL, parse

from megatron.cli import parse_run
from megatron.common.environment import expected_device, local_rank, world_size
from megatron.common.errors import ConfigError


@pytest.mark.parametrize(
    "environ, size, rank",
    [
        ({}, 1, None),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, 8, 3),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 4, 1),
        ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, 2, 0),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, 4, None),
        ({"SLURM_NTASKS": "4"}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 1, None),
    ],
)
def test_variables_of_launchers(environ: dict[str, str], size: int, rank: int | None) -> None:
    assert (world_size(environ), local_rank(environ)) == (size, rank)


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
