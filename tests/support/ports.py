"""Free ports for programs that need a port number."""

import random
import socket


def free_port() -> int:
    """A port of this host on which no process listens.

    Not one of those that the system gives to outgoing connections: it would give it away before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
