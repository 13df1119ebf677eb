"""Output that may be lost without ending the run: stdout and stderr closed, full, or a pipe that no process reads."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from megatron.common.errors import escaped


class LossyStream:
    """A stream of text whose errors are ignored: what cannot be written is dropped. Otherwise the stream it wraps.

    On a terminal control characters are escaped, which names and texts in files may have: they could hide a message.
    It keeps trying: a disk that was full may have space again.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name, self._has_warned = stream, name, False
        self._is_terminal = stream.isatty()

    def write(self, text: str) -> int:
        """Write ``text``, or drop it. Returns its length."""
        if self._is_terminal and not text.isprintable():
            text = escaped(text, "\n\r\t")
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._warn(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write some lines, or drop them."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what has been written, as far as possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._warn(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _warn(self, error: Exception) -> None:
        """Report the first loss of stdout on stderr."""
        if not self._has_warned and self._name == "stdout":
            self._has_warned = True
            reason = getattr(error, "strerror", None) or error
            print(f"warning: stdout cannot be written ({reason}); continuing without", file=sys.stderr, flush=True)


def ignore_lost_output(*, terminals_only: bool = False) -> None:
    """From here on nothing that this process prints can end it, or on ``terminals_only`` what it prints there."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, LossyStream) and (stream.isatty() or not terminals_only):
            setattr(sys, name, LossyStream(stream, name))


def open_closed_streams() -> None:
    """Open ``os.devnull`` in place of standard streams that the caller closed.

    Otherwise the next files that are opened would take their numbers, and libraries would print into them.
    """
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        name = ("stdin", "stdout", "stderr")[number]
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


_screens: list[int] = []
"""Where stderr goes while it is held back."""


@contextmanager
def held_stderr() -> Iterator[None]:
    """Hold back what libraries write to stderr inside of the block: it is dropped if the block raises an exception.

    For one thread at a time.
    """
    with open(os.memfd_create("stderr"), "w+b", 0) as held:
        _screens.append(os.dup(2))
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(_screens[0], 2)
            os.close(_screens.pop())
        held.seek(0)
        with suppress(OSError), open(2, "wb", closefd=False) as screen:
            screen.write(held.read())


def release_stderr() -> None:
    """Nothing is held back any more: for the last words of a process, from any thread or a handler of a signal."""
    for screen in _screens:
        with suppress(OSError):
            os.dup2(screen, 2)
