"""The socket that the ranks meet at: where the first rank listens, tried before anything waits for it."""

import errno
import ipaddress
import socket
from collections.abc import Mapping

from megatron.config.environment import on_one_host, ranks_on_host
from megatron.config.environment import rank as rank_of
from megatron.config.errors import LaunchError

LISTEN = "MASTER_LISTEN"
"""Where the environment may name another address to listen at, such as 0.0.0.0: all. MASTER_ADDR has to lead there."""

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def hosts_store(environ: Mapping[str, str]) -> bool:
    """Whether this process is the one that the others find; under torchrun the launcher is, in its own way."""
    return rank_of(environ) == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def check_port(environ: Mapping[str, str]) -> None:
    """See that the first rank can listen where the environment tells the others to find it.

    Under mpirun that is known later.

    Raises:
        LaunchError: as ``listen`` does.
    """
    if hosts_store(environ) and "MASTER_ADDR" in environ:
        listen(environ).close()


def listen(environ: Mapping[str, str]) -> socket.socket:
    """A socket that listens at the address where the others look for the first rank, and at no other.

    Left to itself torch's store listens on every interface of the host.

    Raises:
        LaunchError: the address is not this host's, or one that only this host can reach; another program has the
            port, or only the administrator may have it.
    """
    name, port = environ.get(LISTEN) or environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        places = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise LaunchError(f"{name}, where rank 0 is to listen, does not resolve: {error.strerror}") from error
    for family, _, _, _, place in places:
        _check_reach(environ, name, place[0])
        try:
            return socket.create_server(place, family=family)
        except OSError as error:
            if error.errno in _NOT_HERE:
                continue
            raise LaunchError(
                f"port {port} of the rendezvous cannot be opened ({error.strerror}): an earlier run may still "
                f"be there, which ss -ltnp 'sport = :{port}' shows; end it, or choose another with --master_port "
                "(deepspeed) or MASTER_PORT"
            ) from error
    raise LaunchError(
        f"{name}, where rank 0 is to listen, is not an address of its host {socket.gethostname()}: set MASTER_ADDR to "
        f"one, or, if it leads here by way of another host, {LISTEN}=0.0.0.0"
    )


def _check_reach(environ: Mapping[str, str], name: str, address: str) -> None:
    """Raises LaunchError where ranks of other hosts would look for the first one in vain."""
    is_known = ranks_on_host(environ) is not None
    if not is_known or on_one_host(environ) or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    raise LaunchError(
        f"{name} is {address} on its own host, where ranks of other hosts do not reach it: set MASTER_ADDR to the "
        f"address in the network of the run, or {LISTEN}=0.0.0.0 to listen in all"
    )
