"""Hostfiles: what is one, what is not, and where it says so."""

from pathlib import Path

import pytest

from megatron.common.errors import ConfigError
from megatron.tools.cluster.hostfile import Host, read_hostfile, select

HOSTS = [Host("a", (0, 1, 2, 3)), Host("b", (0, 1)), Host("c", (0,))]


def read(tmp_path: Path, text: str | bytes) -> list[Host]:
    file = tmp_path / "hostfile"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_hostfile(file)


def complaints(tmp_path: Path, text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    return [message.removeprefix(f"{tmp_path}/hostfile") for message in caught.value.messages]


def test_hosts_comments_blank_lines_and_line_ends(tmp_path: Path) -> None:
    text = "# a cluster\n\nworker-1 slots=2\r\n  10.0.0.2\tslots=1  # two were too many\nfd00::3 slots=1\n#x slots=9"
    assert read(tmp_path, text) == [Host("worker-1", (0, 1)), Host("10.0.0.2", (0,)), Host("fd00::3", (0,))]


BROKEN = {
    "worker-1": (":1:9: ", "no slots"),
    "worker-1 slots=": (":1:10: ", "slots=N"),
    "worker-1  slots = 2": (":1:11: ", "slots=N"),
    "slots=2": (":1:1: ", "is not a host name because of '='"),
    "worker-1 slots=2 max_slots=4": (":1:18: ", "remove it"),
    "a slots=1\n\nb slots=1\n a slots=2": (":4:2: ", "a is in line 1 already"),
    "a,b slots=2": (":1:1: ", "because of ','"),
    "wörker slots=2": (":1:1: ", "because of 'ö'"),
    f"{'a' * 254} slots=2": (":1:1: ", "254 characters"),
    "": (" names no host", "worker-1 slots=8"),
}


@pytest.mark.parametrize("text", BROKEN)
def test_malformed_line_is_named_by_line_and_column(tmp_path: Path, text: str) -> None:
    (message,) = complaints(tmp_path, text)
    place, reason = BROKEN[text]
    assert message.startswith(place) and reason in message and "\n" not in message


def test_more_hosts_than_can_be_checked(tmp_path: Path) -> None:
    (message,) = complaints(tmp_path, "".join(f"worker-{n} slots=8\n" for n in range(200_000)))
    assert "200,000 hosts" in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "not UTF-8" in complaints(tmp_path, b"a slots=1\n\xff slots=1")[0]
    with pytest.raises(ConfigError, match="No such file"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_hostfile(tmp_path)


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", {"a": (0, 1, 2, 3), "b": (0, 1), "c": (0,)}),
        ("c@a:3,1", "", {"a": (1, 3), "c": (0,)}),
        ("", "b", {"a": (0, 1, 2, 3), "c": (0,)}),
        ("", "a:0,2@c:0", {"a": (1, 3), "b": (0, 1)}),
    ],
)
def test_filters_leave_the_same_as_deepspeeds(include: str, exclude: str, left: dict) -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    assert select(HOSTS, include, exclude) == [Host(*item) for item in left.items()]
    pool = {host.name: len(host.slots) for host in HOSTS}
    assert {name: tuple(slots) for name, slots in parse_inclusion_exclusion(pool, include, exclude).items()} == left


@pytest.mark.parametrize(
    ("include", "exclude", "words"),
    [
        ("a", "b", ["both set"]),
        ("d", "", ["--include d: the hostfile has no 'd'", "choose from a, b, c"]),
        ("a:4", "", ["a has no slot 4", "0 to 3"]),
        ("a:", "", ["'' is not a slot of a"]),
        ("a:0,0", "", ["a slot of a is named twice"]),
        ("", "a:0@a", ["a slot of a is named twice"]),
        ("", "a@b@c", ["excludes every host"]),
    ],
)
def test_contradictory_filter_is_refused(include: str, exclude: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        select(HOSTS, include, exclude)
    assert all(word in str(caught.value) for word in words), caught.value
