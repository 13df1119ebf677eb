"""The port that the ranks meet at, tried before anything waits for it."""

import socket
from collections.abc import Mapping

from megatron.errors import LaunchError
from megatron.launch.launcher import rank


def check_port(environ: Mapping[str, str]) -> None:
    """See that the first rank can listen where the environment tells the others to find it.

    Under torchrun the launcher listens, and has seen to that itself.

    Raises:
        LaunchError: another program has the port, or only the administrator may have it.
    """
    if rank(environ) != 0 or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    port = int(environ.get("MASTER_PORT", "29500"))
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError as error:
        raise LaunchError(
            f"port {port}, where the ranks are to meet, cannot be had ({error.strerror}): an earlier run may still be "
            f"there, which ss -ltnp 'sport = :{port}' shows; end it, or choose another with --master_port (deepspeed) "
            "or MASTER_PORT"
        ) from error
