"""The rendezvous: where rank 0 listens, a port that is taken, ranks that never arrive, and who leaves last."""

import os
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from socket import EAI_AGAIN, EAI_NONAME, gaierror
from threading import Thread
from unittest.mock import MagicMock, Mock

import pytest
from support.bare_ranks import BareRanks
from support.programs import TINY_MODEL, Programs
from support.warm import places, start
from torch.distributed import DistStoreError, Store, TCPStore

from megatron.common.errors import ConfigError, LaunchError
from megatron.config import ParallelConfig
from megatron.launch import rank
from megatron.launch.distributed import connect, distributed, leave_store, rendezvous_barrier
from megatron.launch.environment import free_port, listen, prepare_environment

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


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"])
def test_a_backend_that_cannot_start(programs: Programs, variable: str) -> None:
    ended = programs.pretrain(1, *SETTINGS, **{variable: "none"})
    assert ended.returncode == 6 and "Traceback" not in ended.output
    (line,) = ended.output.splitlines()[-1:]
    assert "error: the process group of gloo cannot form (" in line and "; check GLOO_SOCKET_IFNAME and other" in line


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (RuntimeError("a tensor is wrong"), RuntimeError, "a tensor is wrong"),
        (RuntimeError("gloo: rank 1 is unknown"), LaunchError, "of gloo cannot form (gloo: rank 1 is unknown)"),
        (DistStoreError("no such key"), LaunchError, "of gloo cannot form (no such key)"),
    ],
)
def test_an_error_of_init_distributed_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], message: str
) -> None:
    """What is not the backend's is a failure like any other, with code 1; what is has no advice about interfaces."""
    for name, value in {**PLACE, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("deepspeed.init_distributed", MagicMock(side_effect=error))
    monkeypatch.setattr("megatron.launch.distributed.rendezvous_barrier", lambda *_: None)
    with pytest.raises(kind) as caught, distributed(ParallelConfig(world_size=1, distributed_backend="gloo")):
        pass
    assert type(caught.value) is kind and str(caught.value).endswith(message)


def test_the_mpi_of_mpi4py_is_not_that_of_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each process is alone in its own world."""
    for name, value in {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    alone = lambda _: [monkeypatch.setenv(*pair) for pair in ({**PLACE, "WORLD_SIZE": "1"}).items()]  # noqa: E731
    monkeypatch.setattr("megatron.launch.distributed.discover_mpi_ranks", alone)
    with pytest.raises(ConfigError, match="^the launcher started 2 processes, and mpi4py finds 1: start with the mpi"):
        distributed(ParallelConfig(world_size=2)).__enter__()


@pytest.mark.parametrize(
    "flag, values, problem",
    [
        ("--seed", "1 2", "--seed is 2 here, and 1 on rank 0"),
        ("--lr-decay-style", "linear cosine", "--lr-decay-style is cosine here, and linear on rank 0"),
        ("--data-path", "{0}/data1 {0}/data2", "the hash of the data is"),
    ],
)
def test_ranks_with_other_arguments_or_files(
    programs: Programs, tmp_path: Path, flag: str, values: str, problem: str
) -> None:
    data = programs.data_arguments
    for number, changed in enumerate((b"", b"\0\0"), 1):
        prefix, copy = Path(data[data.index("--data-path") + 1]), tmp_path / f"data{number}"
        copy.with_suffix(".idx").write_bytes(prefix.with_suffix(".idx").read_bytes())
        copy.with_suffix(".bin").write_bytes(changed + prefix.with_suffix(".bin").read_bytes()[len(changed) :])
    words = ("pretrain_gpt2.py", *TINY_MODEL, *data, *SETTINGS, "--save", tmp_path / "ck", flag)
    first, second = (
        start([*map(str, words), value], place, programs.root, tmp_path / str(number))
        for number, (value, place) in enumerate(
            zip(values.format(tmp_path).split(), places(2, os.environ), strict=True), 1
        )
    )
    second.join()
    first.kill()
    assert second.exitcode == 2
    line = (tmp_path / "2").read_text().splitlines()[-1]
    assert f"rank 1: {problem}" in line and "on rank 0: start all ranks with the same arguments and files" in line


@pytest.mark.parametrize("size", ["1", "2"])
def test_ranks_that_were_started_with_different_numbers(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    """Also where all those of one number have arrived, and go on."""
    monkeypatch.setattr("megatron.launch.distributed._SKEW_SECONDS", 0.0)
    shared = {**PLACE, "MASTER_PORT": str(free_port())}
    errors, stores = list[LaunchError](), []

    def arrive(**place: str) -> None:
        try:
            stores.append(rendezvous_barrier({**shared, **place}, timedelta(seconds=2)))
        except LaunchError as error:
            errors.append(error)

    other = Thread(target=arrive, kwargs={"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"})
    other.start()
    arrive(WORLD_SIZE=size)
    other.join()
    lines = "\n".join(map(str, errors))
    assert len(stores) == (size == "1")
    if stores:
        assert "1 of 3 ranks did not connect within" in lines
    else:
        assert "all 2 ranks connected, and not all were started with WORLD_SIZE=2" in lines


def test_a_lost_rank_0_is_reported_by_another_rank_of_its_host() -> None:
    place = {**PLACE, "MASTER_PORT": str(free_port()), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3"}
    host = TCPStore(place["MASTER_ADDR"], int(place["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    errors = list[LaunchError]()

    def arrive() -> None:
        try:
            rendezvous_barrier(place, timedelta(seconds=60))
        except LaunchError as error:
            errors.append(error)

    waiting = Thread(target=arrive)
    waiting.start()
    host.wait(["arrived/1"], timedelta(seconds=30))
    del host
    waiting.join()
    (error,) = errors
    assert error.only_here and str(error).startswith("lost rank 0 before all ranks had connected: it printed why")


def test_ranks_that_never_arrive(programs, tmp_path: Path) -> None:
    words = (*SETTINGS, "--distributed-timeout-minutes", "0.1")
    some = BareRanks(programs, tmp_path / "some", "none 0 0", *words, size=4, ranks=(0, 2))
    alone = BareRanks(programs, tmp_path / "alone", "none 0 0", *words, size=2, ranks=(1,))
    assert [some.ended(), alone.ended()] == [[6, 6], [6]]
    assert (
        "2 of 4 ranks did not connect within 0.1 minutes (--distributed-timeout-minutes): ranks 1, 3" in some.errors[-1]
    )
    assert "no answer at 127.0.0.1:" in alone.errors[-1] and "check that rank 0 is started" in alone.errors[-1]
    assert "c10d" not in alone.output, "torch's own pages about it"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "does not set the rank of this process (RANK): start it with torchrun, deepspeed or mpirun; or, for a"),
        ({"RANK": "0"}, "the environment has RANK without WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({**PLACE, "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "the environment has RANK without MASTER_ADDR"),
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


def place(address: str, *, ranks: int = 2, here: int = 2, **others: str) -> dict[str, str]:
    """The environment of the first of so many ranks."""
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(here)}
    place = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    return {"DS_ACCELERATOR": "cpu", **sizes, **place, **others}


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        (place("127.0.0.1"), "127.0.0.1"),
        (place("127.0.0.2"), "127.0.0.2"),
        (place("127.0.0.1", here=1, MASTER_LISTEN="0.0.0.0"), "0.0.0.0"),
        (place("198.51.100.1", here=1, MASTER_LISTEN="0.0.0.0"), "0.0.0.0"),
    ],
)
def test_rank_0_listens_at_the_rendezvous_address(environ, address) -> None:
    with listen(environ) as server:
        assert server.getsockname() == (address, int(environ["MASTER_PORT"]))


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        (place("198.51.100.1"), "198.51.100.1, where rank 0 is to listen, is not an address of its host"),
        (place("127.0.1.1", here=1), "127.0.1.1 is 127.0.1.1 on its own host, where ranks of other hosts do not reach"),
        (place("no-such-host.invalid"), "no-such-host.invalid, where rank 0 is to listen, does not resolve"),
        (place("a" * 64), f"{'a' * 64}, where rank 0 is to listen, does not resolve"),
    ],
)
def test_an_invalid_address_is_refused_before_torch(environ, reason) -> None:
    with pytest.raises(LaunchError, match=f"^{reason}"):
        prepare_environment(environ)


@pytest.mark.parametrize(("number", "agent"), [("1", "False"), ("0", "True")])
def test_other_ranks_do_not_listen(number: str, agent: str) -> None:
    """Nor does rank 0 under torchrun, whose agent listens."""
    environ = place("198.51.100.1", RANK=number, TORCHELASTIC_USE_AGENT_STORE=agent)
    prepare_environment(environ)


@pytest.mark.parametrize(
    ("here", "variables", "interface"),
    [(2, {}, "lo"), (2, {"GLOO_SOCKET_IFNAME": "eth1", "DS_ACCELERATOR": ""}, "eth1"), (1, {}, None)],
)
def test_ranks_of_one_host_communicate_over_loopback(here, variables, interface) -> None:
    environ = place(socket.gethostbyname("localhost"), here=here, RANK="1", **variables)
    prepare_environment(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface
    assert environ["DS_ACCELERATOR"]


def test_rank_0_reports_errors_whatever_its_local_rank(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    def main() -> None:
        raise LaunchError("the port is in use")

    for name, value in place("127.0.0.1", ranks=8, here=8, LOCAL_RANK="5").items():
        monkeypatch.setenv(name, value)
    assert rank._exit_code(main, *rank._rank_and_is_first()) == 6
    assert capsys.readouterr().err.endswith(": error: the port is in use\n")


TIMEOUT = timedelta(seconds=60)


def environment(number: int, port: int) -> dict[str, str]:
    return {"RANK": str(number), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def stores(port: int) -> list[Store]:
    """The connections of three ranks; the first hosts the store."""
    return [connect(environment(number, port), TIMEOUT) for number in range(3)]


def test_ranks_that_torchrun_restarts_meet_and_see_nothing_of_an_earlier_attempt() -> None:
    """Each of its hosts counts the restarts for itself; one that joins later begins at 0."""
    agent = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    places = [environment(number, agent.port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"} for number in range(3)]

    def attempt(counts: tuple[int, ...]) -> list[Store]:
        environs = [
            {**place, "TORCHELASTIC_RESTART_COUNT": str(count)} for place, count in zip(places, counts, strict=True)
        ]
        with ThreadPoolExecutor() as pool:  # rank 0 comes last
            return [*pool.map(partial(rendezvous_barrier, timeout=timedelta(seconds=20)), reversed(environs))]

    attempt((0, 0, 0))[0].set("failure", "rank 1 was killed")
    first, *others = attempt((0, 1, 0))
    assert not first.check(["failure"])
    others[-1].set("new", "")
    assert first.check(["new"])


def test_the_host_waits_for_all_other_ranks() -> None:
    port = free_port()
    host, *others = stores(port)
    leaving = Thread(target=leave_store, args=(host, environment(0, port), TIMEOUT), daemon=True)
    leaving.start()
    for number, store in enumerate(others, start=1):
        store.get("exits/0")  # the host is leaving
        leaving.join(0.2)
        assert leaving.is_alive(), f"rank {number} has not left yet"
        leave_store(store, environment(number, port), TIMEOUT)
    leaving.join(TIMEOUT.total_seconds())
    assert not leaving.is_alive()


def test_the_wait_is_bounded_and_a_lost_host_is_no_error() -> None:
    port = free_port()
    host, other, _ = stores(port)
    leave_store(host, environment(0, port), timedelta(milliseconds=10))
    del host
    leave_store(other, environment(1, port), TIMEOUT)


@pytest.mark.parametrize(
    ("error", "raised", "printed"),
    [
        (
            gaierror(EAI_AGAIN, "try again"),
            "no answer at nowhere.invalid:1",
            f"([Errno {EAI_AGAIN}] try again); waiting for it",
        ),
        (
            gaierror(EAI_NONAME, "unknown"),
            f"nowhere.invalid does not resolve ([Errno {EAI_NONAME}] unknown): set it to",
            f"([Errno {EAI_NONAME}] unknown); waiting for it",
        ),
        (UnicodeError("label too long"), "nowhere.invalid does not resolve (label too long): set it to", ""),
    ],
    ids=str,
)
def test_a_name_that_may_resolve_later_is_waited_for_and_an_unknown_one_for_a_minute(
    error: Exception, raised: str, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    place = {**PLACE, "MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    monkeypatch.setattr("megatron.launch.distributed.getaddrinfo", Mock(side_effect=error))
    monkeypatch.setattr("megatron.launch.distributed._NAME_SECONDS", 1)
    with pytest.raises(LaunchError, match=re.escape(raised)):
        rendezvous_barrier(place, timedelta(seconds=1))
    assert (f"warning: MASTER_ADDR nowhere.invalid does not resolve {printed}" in capsys.readouterr().err) == bool(
        printed
    )
