"""Hostile input for fuzzers, and what a program may do with it: accept it, or refuse it as a user's mistake."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from megatron.common.errors import UserError

T = TypeVar("T")


class Attack:
    """A pickle that runs code when it is read: it makes the folder ``marker``."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e-9, 1e-45, 1e-320, 1e9, 1e18, 1e300, float("inf"), 2**31, 2**32, 2**63, 10**400]),
)
TEXTS = st.one_of(
    st.text(max_size=20), st.sampled_from(["", " ", "\0", "../x", "/dev/null", "a\nb", "\ud800", "é", "auto"])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)
"""Values that JSON can hold."""


def outcome(call: Callable[[], T], *codes: int) -> T | None:
    """The result of ``call``; None after a UserError with one of the exit codes, whose messages are a line each."""
    try:
        return call()
    except UserError as error:
        assert error.exit_code in codes, error
        assert error.messages
        for message in error.messages:
            assert message.strip() and len(message.splitlines()) == 1, repr(message)
            message.encode()  # or the screen would raise
        return None


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Fail if the block creates, changes or removes a file below ``folder``."""
    before = _state(folder)
    yield
    assert _state(folder) == before, "files were written"


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one example."""
    with tempfile.TemporaryDirectory(
        prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    ) as name:
        yield Path(name)


_BYTES = [b"\xff" * 8, b"\0" * 8, b"\xff" * 7 + b"\x7f", b"[" * 20000, b"9" * 5000, b'"', b"1e999"]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` with some bytes changed, removed, repeated or inserted; sometimes something else altogether."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        stop = min(start + draw(st.integers(0, 16)), len(content))
        content[start:stop] = draw(
            st.one_of(
                st.binary(max_size=16),
                st.just(bytes(content[:stop])),
                st.sampled_from(_BYTES),
            )
        )
    return bytes(content)


@st.composite
def altered(draw: st.DrawFn, tree: Any) -> Any:
    """``tree``, a value of JSON, with some of its values replaced, removed or moved to another key."""
    return _altered(draw, tree, draw(st.integers(1, 3)))


def _altered(draw: st.DrawFn, tree: Any, changes: int) -> Any:
    for _ in range(changes):
        tree = _altered_once(draw, tree)
    return tree


def _altered_once(draw: st.DrawFn, tree: Any) -> Any:
    if isinstance(tree, dict) and tree and draw(st.integers(0, 7)):
        key = draw(st.sampled_from(sorted(tree)))
        kind = draw(st.integers(0, 9))
        rest = {name: value for name, value in tree.items() if name != key}
        if kind == 0:
            return rest
        if kind == 1:
            return {**rest, draw(TEXTS): tree[key]}
        return {**tree, key: _altered_once(draw, tree[key])}
    if isinstance(tree, list) and tree and draw(st.integers(0, 7)):
        index = draw(st.integers(0, len(tree) - 1))
        return [*tree[:index], _altered_once(draw, tree[index]), *tree[index + 1 :]]
    return draw(VALUES)
