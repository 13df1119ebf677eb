"""Threads of a rank: the cores of the host divided by its ranks, unless the user sets a number of threads."""

import os

import pytest
from support.command_lines import CPU, CUDA

from megatron.common.errors import ConfigError
from megatron.launch.environment import divide_cores, prepare_environment

MPIRUN = {"OMPI_COMM_WORLD_RANK": "0"}


@pytest.mark.parametrize(
    ("own", "ranks", "variables", "threads"),
    [
        (16, 1, {}, "16"),
        (16, 4, {}, "4"),
        (16, 5, {}, "3"),
        (2, 4, {}, "1"),
        (4, 2, {}, "2"),  # of a container
        (1, 2, MPIRUN, "1"),  # bound to a core
        (8, 2, MPIRUN, "8"),  # bound to eight
        (16, 4, MPIRUN, "4"),  # not bound
        (16, 4, {"OMP_NUM_THREADS": ""}, "4"),
        (16, 4, {"OMP_NUM_THREADS": "7"}, "7"),
        (16, 4, {"OMP_NUM_THREADS": "4,2"}, "4,2"),  # of nested parallel regions
    ],
)
def test_ranks_share_the_cores_of_their_host(monkeypatch, own, ranks, variables, threads) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(own))
    environ = dict(variables)
    divide_cores(environ, ranks)
    assert environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
def test_every_program_sets_its_threads(device) -> None:
    environ = dict(device)
    prepare_environment(environ)
    assert int(environ["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["0", "-1", "four", "100000", "2.5", "4,0", "9" * 30])
def test_what_is_no_number_of_threads_is_an_error(text) -> None:
    """OpenMP ignores some of these with a line per process, and starts as many threads for others."""
    with pytest.raises(ConfigError, match=f"OMP_NUM_THREADS={text}: set a whole number from 1 to 1024, or unset it"):
        prepare_environment({**CPU, "OMP_NUM_THREADS": text})
