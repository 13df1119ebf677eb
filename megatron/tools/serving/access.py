"""Access control: the listening socket, the API key and the allowed Host header. Does not import torch."""

import hmac
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from megatron.common.errors import ConfigError, LaunchError
from megatron.common.reading import regular
from megatron.tools.serving.protocol import RequestError

KEY_VARIABLE = "SERVE_API_KEY"
_MOST_CHARACTERS = 4096


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host`` and ``port`` (0 is any free port).

    Raises ConfigError if the host does not exist, LaunchError if the address is not available.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such host; give a name or an address of this machine") from error
    try:
        return socket.create_server(
            address[:2], family=family, dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        )
    except OSError as error:
        raise LaunchError(
            f"{address[0]}:{port} is not available ({os.strerror(error.errno or 0)}); choose another --port or --host, "
            f"or end the program that ss -ltnp 'sport = :{port}' shows"
        ) from error


def url_of(listener: socket.socket) -> str:
    """The URL of the server."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_key(path: Path | None, environ: Mapping[str, str]) -> str | None:
    """The API key that clients must send: from a file, else from the environment, else None.

    Raises ConfigError if it cannot be read, if other users may read the file, or if it is not valid in an HTTP header.
    """
    if path is None:
        source, key = f"the variable {KEY_VARIABLE}", environ.get(KEY_VARIABLE)
        if key is None:
            return None
    else:
        source = f"--api-key-file {path}"
        try:
            with open(path, encoding="ascii", opener=regular) as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(_MOST_CHARACTERS + 2).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read ({getattr(error, 'strerror', 'not ASCII')})") from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{source}: other users can read it; run chmod 600 {path}")
    if not key or not key.isascii() or not key.isprintable() or " " in key or len(key) > _MOST_CHARACTERS:
        raise ConfigError(f"{source} must hold one word of ASCII characters, at most {_MOST_CHARACTERS:,}")
    return key


def check_key(given: str | None, key: str | None) -> None:
    """Raise RequestError if the Authorization header does not hold ``key``."""
    if key is not None and not hmac.compare_digest((given or "").encode(), f"Bearer {key}".encode()):
        raise RequestError("this server requires a key: Authorization: Bearer KEY", status=401, code="invalid_api_key")


def check_host(given: str | None) -> None:
    """Raise RequestError if the Host header is not a loopback name.

    Without this check a web page whose name resolves to this machine could read the responses (DNS rebinding).
    """
    host = re.fullmatch(r"(?:\[([^]]*)]|([^:]*))(?::[0-9]{1,5})?", given or "")
    if host is None or not is_loopback((host[1] or host[2]).lower()):
        raise RequestError("this server answers to localhost and 127.0.0.1 only", status=403)
