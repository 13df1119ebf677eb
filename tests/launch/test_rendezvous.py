"""Errors of the rendezvous: a port that is taken, ranks that never arrive."""

import socket
from pathlib import Path

import pytest
from support.bare_ranks import BareRanks

from megatron.common.errors import ConfigError, LaunchError
from megatron.config import ParallelConfig

PLACE = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SETTINGS = "--train-iters 1 --batch-size 2 --gas 4 --eval-iters 0".split()


def test_the_port_is_taken(programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ended = programs.pretrain(1, *SETTINGS, **place)
    assert ended.returncode == 6
    (line,) = ended.output.splitlines()
    assert f"port {port} of the rendezvous cannot be opened (Address already in use" in line
    assert f"ss -ltnp 'sport = :{port}'" in line


def test_ranks_that_never_arrive(programs, tmp_path: Path) -> None:
    words = (*SETTINGS, "--distributed-timeout-minutes", "0.1")
    some = BareRanks(programs, tmp_path / "some", "none 0 0", *words, size=4, ranks=(0, 2))
    alone = BareRanks(programs, tmp_path / "alone", "none 0 0", *words, size=2, ranks=(1,))
    assert [some.ended(), alone.ended()] == [[6, 6], [6]]
    assert (
        "2 of 4 ranks did not connect within 0.1 minutes (--distributed-timeout-minutes): ranks 1, 3" in some.errors[-1]
    )
    assert "no answer at 127.0.0.1:" in alone.errors[-1] and "check that rank 0 is started" in alone.errors[-1]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "does not set the rank of this process (RANK): start it with torchrun, deepspeed or mpirun; or, for a"),
        ({"RANK": "0"}, "the environment has RANK without WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (
            {**PLACE, "WORLD_SIZE": "3"},
            "the launcher started 3 processes, and the layout is for 4, in replicas of 2: start a multiple of 2",
        ),
    ],
)
def test_a_library_user_without_a_launcher_gets_an_error_at_once(monkeypatch, environ: dict, message: str) -> None:
    from megatron.launch.distributed import distributed

    for name in (*PLACE, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught, distributed(ParallelConfig(model_parallel_size=2, world_size=4)):
        pass
    assert len(caught.value.messages) == 1 and message in caught.value.messages[0]


def test_classic_initialization_without_a_process_group_is_an_error_at_once() -> None:
    from megatron import mpu

    with pytest.raises(LaunchError, match="this process has joined no process group; start with torchrun"):
        mpu.initialize_model_parallel(2)
