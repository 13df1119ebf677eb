"""Commands for other hosts: lists of words, quoted once, for a remote shell, and never put together as text here."""

import re
import shlex
from collections.abc import Mapping, Sequence

CONNECT_SECONDS = 5
_PLAIN = re.compile(r"[A-Za-z0-9@_+=:,./-]+")


def ssh_command(host: str, words: Sequence[str], port: int | None = None) -> list[str]:
    """The ssh command that runs ``words`` on ``host``: it asks nobody anything, and gives up on a host that is silent.

    Whether a host key is trusted is left to ssh's own configuration. ``host`` has to be one by
    ``hostfile.name_problem``, and stands behind ``--`` all the same.
    """
    return ["ssh", "-T", *_options(alive=5), *(["-p", str(port)] if port else []), "--", host, shlex.join(words)]


def ssh_patience(environ: Mapping[str, str]) -> dict[str, str]:
    """What makes pdsh's ssh ask nobody anything, and leave a host that has been silent for two minutes.

    Else a launcher waits for ever for a host that is gone. What the environment says already wins.
    """
    own = environ.get("PDSH_SSH_ARGS_APPEND", "")
    return {"PDSH_SSH_ARGS_APPEND": " ".join([own, *_options(alive=60)]).strip()}


def _options(alive: int) -> list[str]:
    """For ssh. A host has twice ``alive`` seconds to show that it is there."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ConnectionAttempts": 1,
        "ServerAliveInterval": alive,
        "ServerAliveCountMax": 2,
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def is_plain(text: str) -> bool:
    """Whether every shell takes ``text`` for one word that says what it says; pdsh too, to which % means something."""
    return _PLAIN.fullmatch(text) is not None


def quote_for_pdsh(argument: str) -> str:
    """``argument`` as DeepSpeed's pdsh runner has to be given it, so that the remote program gets it as it is.

    The runner puts one with a space between double quotes and minds only the double quotes within; others it hands
    to the remote shell as they are. pdsh replaces what begins with %, of which two stand for one.
    """
    if " " in argument:
        quoted = re.sub(r"([\\$`])", r"\\\1", argument)
    else:
        quoted = shlex.quote(argument)
    return quoted.replace("%", "%%")
