"""Ports for programs that have to be told one."""

import socket


def free_port() -> int:
    """A port of this host that nobody listened on a moment ago."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
