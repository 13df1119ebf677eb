"""Keeps the run alive when stdout or stderr cannot be written: closed, on a full disk, or a pipe without reader."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any, TextIO

from megatron.common.errors import ResourceError, escaped


class LossyStream:
    """Wraps a text stream and ignores its errors: text that cannot be written is dropped.

    On a terminal, control characters are escaped: names and texts in files may contain them to hide a message. Each
    write is tried: a disk that was full may have space again.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.lost: str | None = None
        """Why text could not be written, if that has happened."""
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
        is_first, self.lost = self.lost is None, getattr(error, "strerror", None) or str(error)
        if is_first and self._name == "stdout":
            print(f"warning: stdout cannot be written ({self.lost}); continuing without", file=sys.stderr, flush=True)


def check_output() -> None:
    """For programs whose result is what they print: raises ResourceError if it was lost, as on a full disk.

    A pipe that its reader has closed loses nothing.
    """
    reason = getattr(sys.stdout, "lost", None)
    if reason not in (None, os.strerror(errno.EPIPE)):
        raise ResourceError(f"stdout cannot be written ({reason}), and the result is lost: name a file on another disk")


def ignore_lost_output(*, terminals_only: bool = False) -> None:
    """Wrap stdout and stderr in a ``LossyStream``, or only those that are terminals with ``terminals_only``."""
    open_closed_streams()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):  # characters that the locale lacks are escaped
            with suppress(OSError):  # the flush may fail, or the stream was a file and is now a pipe
                stream.reconfigure(errors="backslashreplace")
        if not isinstance(stream, LossyStream) and (stream.isatty() or not terminals_only):
            setattr(sys, name, LossyStream(stream, name))


def open_closed_streams() -> None:
    """Open ``os.devnull`` in place of standard streams that the caller closed.

    Otherwise the next files that are opened would get their descriptors, and libraries would print into them.
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


class _StderrBuffer:
    """Redirects file descriptor 2 to a buffer while at least one thread is inside ``buffered_stderr``."""

    def __init__(self) -> None:
        self._lock, self._threads, self._has_failed = Lock(), 0, False
        self._original = -1
        self._buffer: IO[bytes] | None = None

    def enter(self) -> None:
        with self._lock:
            if not self._threads:  # a new file each time: a forked process must not share its position
                in_memory = hasattr(os, "memfd_create")
                file = open(os.memfd_create("stderr"), "w+b", 0) if in_memory else TemporaryFile(buffering=0)
                self._has_failed, self._original, self._buffer = False, os.dup(2), file
                os.dup2(file.fileno(), 2)
            self._threads += 1

    def leave(self, *, failed: bool) -> None:
        with self._lock:
            self._threads -= 1
            self._has_failed |= failed
            if self._threads or self._buffer is None:
                return
            os.dup2(self._original, 2)
            os.close(self._original)
            with self._buffer as buffer:
                if buffer.tell() and not self._has_failed:
                    buffer.seek(0)
                    with suppress(OSError), open(2, "wb", closefd=False) as stderr:
                        stderr.write(buffer.read())

    def release(self) -> None:
        # Without the lock: the interrupted thread may hold it.
        if self._threads:
            with suppress(OSError):
                os.dup2(self._original, 2)


_stderr = _StderrBuffer()


def release_stderr() -> None:
    """Restore stderr for the last messages of a process; safe in any thread and in signal handlers."""
    _stderr.release()


@contextmanager
def buffered_stderr() -> Iterator[None]:
    """Buffer stderr in the block; the output of libraries is dropped if the block raises an exception.

    Libraries in Rust write pages about an error before they raise it. Several threads may be inside at once.
    """
    _stderr.enter()
    failed = True
    try:
        yield
        failed = False
    finally:
        _stderr.leave(failed=failed)
