"""Output that may be lost without ending the run: stdout and stderr closed, full, or a pipe that no process reads."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any, TextIO

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
        if hasattr(stream, "reconfigure"):  # what the locale lacks is escaped
            stream.reconfigure(errors="backslashreplace")
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


class _HeldStderr:
    """Where stderr goes meanwhile, and for how many threads."""

    def __init__(self) -> None:
        self._turn, self._threads, self._has_failed = Lock(), 0, False
        self._screen = -1
        self._held: IO[bytes] | None = None

    def enter(self) -> None:
        with self._turn:
            if not self._threads:  # with a file of its own: a process that is forked must not share its position
                in_memory = hasattr(os, "memfd_create")
                file = open(os.memfd_create("stderr"), "w+b", 0) if in_memory else TemporaryFile(buffering=0)
                self._has_failed, self._screen, self._held = False, os.dup(2), file
                os.dup2(file.fileno(), 2)
            self._threads += 1

    def leave(self, *, failed: bool) -> None:
        with self._turn:
            self._threads -= 1
            self._has_failed |= failed
            if self._threads or self._held is None:
                return
            os.dup2(self._screen, 2)
            os.close(self._screen)
            with self._held as held:
                if held.tell() and not self._has_failed:
                    held.seek(0)
                    with suppress(OSError), open(2, "wb", closefd=False) as screen:
                        screen.write(held.read())

    def release(self) -> None:
        # Without a turn: a signal may have come in the middle of one.
        if self._threads:
            with suppress(OSError):
                os.dup2(self._screen, 2)


_stderr = _HeldStderr()


def release_stderr() -> None:
    """Nothing is held back any more: for the last words of a process, from any thread or a handler of a signal."""
    _stderr.release()


@contextmanager
def buffered_stderr() -> Iterator[None]:
    """Hold back what libraries write to stderr inside of the block: it is dropped if the block raises an exception.

    Libraries in Rust write pages about an error before they raise it. Several threads may be inside at once.
    """
    _stderr.enter()
    failed = True
    try:
        yield
        failed = False
    finally:
        _stderr.leave(failed=failed)
