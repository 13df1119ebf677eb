"""Rank 0 listens at the rendezvous address, and nowhere else."""

import socket

import pytest

from megatron.common.errors import LaunchError
from megatron.launch import rank
from megatron.launch.environment import free_port, listen, prepare_environment


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
    ("here", "variables", "interface"), [(2, {}, "lo"), (2, {"GLOO_SOCKET_IFNAME": "eth1"}, "eth1"), (1, {}, None)]
)
def test_ranks_of_one_host_communicate_over_loopback(here, variables, interface) -> None:
    environ = place(socket.gethostbyname("localhost"), here=here, RANK="1", **variables)
    prepare_environment(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


def test_rank_0_reports_errors_whatever_its_local_rank(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    def main() -> None:
        raise LaunchError("the port is in use")

    for name, value in place("127.0.0.1", ranks=8, here=8, LOCAL_RANK="5").items():
        monkeypatch.setenv(name, value)
    assert rank._exit_code(main, *rank._place()) == 6
    assert capsys.readouterr().err.endswith(": error: the port is in use\n")
