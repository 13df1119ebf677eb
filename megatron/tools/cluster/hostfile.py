"""Hostfiles: reads the hosts of a run and their slots with a strict grammar, before anything is started.

DeepSpeed accepts any first word of a line as a host, and passes it to ssh, pdsh and remote shells. A word such as
``-oProxyCommand=...`` is an option of ssh, which executes it. Here a name consists of letters, digits, dots and
hyphens, or is an IP address.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.common.errors import ConfigError, did_you_mean
from megatron.common.reading import read_bytes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_LONGEST_NAME = 253
_SLOTS = re.compile(r"slots=([0-9]{1,6})")
SPARE = "spare"
"""Third word of a line for a spare host, which only replaces a lost host."""
_MOST_SHOWN = 8
_FORM = "write NAME slots=N, as in: worker-1 slots=8"


class Host(NamedTuple):
    """A host of a run."""

    name: str
    slots: tuple[int, ...]
    """Device numbers, counted from 0, of which each gets a process."""
    spare: bool = False
    """Whether the host only replaces a lost host, see ``tools/launch.py --elastic``."""


def name_problem(name: str) -> str | None:
    """Why ``name`` is not a valid host name; None if it is."""
    if name.startswith("-"):
        return f"the host name {name!r} begins with a hyphen, which makes it an option to ssh; rename the host"
    if len(name) > _LONGEST_NAME:
        return f"the host name has {len(name)} characters; {_LONGEST_NAME} are the most there can be"
    if _NAME.fullmatch(name) or _is_ipv6(name):
        return None
    wrong = next((character for character in name if not re.match(r"[A-Za-z0-9.-]", character)), name[:1])
    return f"{name!r} is not a host name because of {wrong!r}; use letters, digits, dots and hyphens, or an IP address"


LOCALHOST = "localhost"


def is_this_host(name: str) -> bool:
    """Whether ``name`` is localhost, this machine's host name, or one of its addresses.

    Other names are not resolved, since ssh may forward them elsewhere through a port of this machine.
    """
    if name.lower() in (LOCALHOST, socket.gethostname().lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as own:
            own.bind((name, 0))
    except (ValueError, OSError):
        return False
    return not address.is_unspecified


def runs_here_alone(hosts: Sequence[Host]) -> bool:
    """Whether ``hosts`` is only this machine."""
    return len(hosts) == 1 and is_this_host(hosts[0].name)


_LARGEST = 1 << 24
"""Maximum bytes of a hostfile."""
_MOST_HOSTS = 1 << 14
"""Maximum number of hosts; a health check of more would take hours."""


def read_hostfile(path: Path) -> list[Host]:
    """Read the hosts of a hostfile, in its order.

    Raises:
        ConfigError: it cannot be read or has no host; or one message for each invalid line.
    """
    try:
        lines = read_bytes(path, largest=_LARGEST).decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8: write the hostfile as plain text") from None
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}; name a file as in hostfile.example") from None
    hosts: dict[str, Host] = {}
    line_of: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        try:
            host = _parse_line(line)
            if host is not None and host.name in hosts:
                first = f"{host.name} is in line {line_of[host.name]} already"
                raise _BadLine(line.index(host.name) + 1, f"{first}; give a host one line with all its slots")
        except _BadLine as error:
            problems.append(f"{path}:{number}:{error.column}: {error}")
            continue
        if host is not None:
            hosts[host.name], line_of[host.name] = host, number
    if problems:
        raise ConfigError(problems)
    if len(hosts) > _MOST_HOSTS:
        raise ConfigError(f"{path} names {len(hosts):,} hosts, more than the {_MOST_HOSTS:,} that a run may have")
    if all(host.spare for host in hosts.values()):
        raise ConfigError(f"{path} names no host{' that is not spare' if hosts else ''}: {_FORM}")
    return list(hosts.values())


def check_one_filter(include: str, exclude: str) -> None:
    """Raise ConfigError if both filters are set."""
    if include and exclude:
        raise ConfigError("--include and --exclude are both set: remove one")


def select(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """The hosts and slots of a run, in the order of the hostfile.

    Args:
        hosts: all hosts of the hostfile.
        include: ``host[:slot,slot...][@host...]``; without slots, all slots of the host. Empty includes all hosts.
        exclude: hosts and slots not to use, in the same form.

    Raises:
        ConfigError: both filters are set; one is malformed, or names a host or slot that the hostfile does not have; or
            no host remains.
    """
    check_one_filter(include, exclude)
    if not (include or exclude):
        return list(hosts)
    flag, text = ("--include", include) if include else ("--exclude", exclude)
    named = _read_filter(flag, text, {host.name: host for host in hosts})
    chosen = []
    for host in hosts:
        listed = named.get(host.name, frozenset())
        slots = tuple(slot for slot in host.slots if (slot in listed) == bool(include))
        if slots:
            chosen.append(host._replace(slots=slots))
    if not chosen:
        raise ConfigError(f"{flag} {text} excludes every host: name fewer")
    return chosen


class _BadLine(Exception):
    def __init__(self, column: int, message: str):
        self.column = column
        super().__init__(message)


def _parse_line(line: str) -> Host | None:
    """The host of a line; None if it is empty or a comment. Raises _BadLine."""
    code = re.split(r"(?<![^ \t\r])#", line)[0]  # a word that begins with # ends the line
    words = [(match.start() + 1, match[0]) for match in re.finditer(r"[^ \t\r]+", code)]
    if not words:
        return None
    (column, name), *rest = words
    if problem := name_problem(name):
        raise _BadLine(column, problem)
    if not rest:
        raise _BadLine(len(code.rstrip()) + 1, f"{name} has no slots; {_FORM}")
    column, word = rest[0]
    match = _SLOTS.fullmatch(word)
    if not match:
        raise _BadLine(column, f"{word!r} is not slots=N with a whole number from 1 on; {_FORM}")
    if int(match[1]) == 0:
        raise _BadLine(column, f"{name} has no slots; set one for each process, or begin the line with #")
    spare = [word for _, word in rest[1:2]] == [SPARE]
    if len(rest) > 1 + spare:
        column, word = rest[1 + spare]
        raise _BadLine(column, f"{word!r} is more than a name, its slots and the word {SPARE}; remove it")
    return Host(name, tuple(range(int(match[1]))), spare)


def _read_filter(flag: str, text: str, hosts: dict[str, Host]) -> dict[str, frozenset[int]]:
    """Parse a filter into slots by host. Raises ConfigError."""
    named: dict[str, frozenset[int]] = {}
    problems = []
    for part in text.split("@"):
        name, has_slots, numbers = part.partition(":")
        if name not in hosts:
            more = ", ..." if len(hosts) > _MOST_SHOWN else ""
            choices = f"choose from {', '.join(list(hosts)[:_MOST_SHOWN])}{more}"
            advice = did_you_mean(name, hosts, otherwise=choices)
            problems.append(f"{flag} {text}: the hostfile has no {name!r}: {advice}")
            continue
        words = numbers.split(",") if has_slots else [str(slot) for slot in hosts[name].slots]
        if wrong := [word for word in words if not re.fullmatch(r"[0-9]{1,6}", word)]:
            problems.append(f"{flag} {text}: {wrong[0]!r} is not a slot of {name}; write {name}:0,1")
            continue
        slots = frozenset(map(int, words))
        if len(slots) < len(words) or slots & named.get(name, frozenset()):
            problems.append(f"{flag} {text}: a slot of {name} is named twice: a slot has one process; remove one")
            continue
        if missing := sorted(slots - set(hosts[name].slots)):
            count = len(hosts[name].slots)
            problems.append(f"{flag} {text}: {name} has no slot {missing[0]}; it has 0 to {count - 1} in the hostfile")
            continue
        named[name] = named.get(name, frozenset()) | slots
    if problems:
        raise ConfigError(problems)
    return named


def _is_ipv6(name: str) -> bool:
    try:
        return "%" not in name and ipaddress.IPv6Address(name) is not None
    except ValueError:
        return False
