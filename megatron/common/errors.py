"""Errors caused by the user or the environment, with a class for each exit code, and helpers for messages."""

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator


class UserError(Exception):
    """An error that the user can fix. The message says what is wrong, where, and what to do.

    It has a one-line message for each thing that is wrong. Entry points print each message on its own line, without a
    traceback, and exit with ``exit_code``.
    """

    exit_code = 2
    on_every_rank = False
    """Whether all ranks raise the same error, so that only one of them prints it."""
    only_here = False
    """Whether only this process of the host raises the error, and prints it even before the ranks have joined."""

    def __init__(self, messages: str | Iterable[str]):
        lines = [messages] if isinstance(messages, str) else [*messages]
        more = [f"and {len(lines) - _MOST:,} more"] if len(lines) > _MOST else []
        self.messages = [one_line(message) for message in (*lines[:_MOST], *more)]
        super().__init__(self.messages)

    def __str__(self) -> str:
        return "\n".join(self.messages)

    @property
    def in_one_line(self) -> str:
        """All messages, as a part of another one."""
        return "; ".join(self.messages)


class ConfigError(UserError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(UserError):
    """A missing, broken or too small data set, vocabulary or index."""

    exit_code = 3


class CheckpointError(UserError):
    """A missing, broken or incompatible checkpoint."""

    exit_code = 4


class NumericsError(UserError):
    """Training that diverged, such as a loss that is not finite."""

    exit_code = 5
    on_every_rank = True


class LaunchError(UserError):
    """Ranks that could not be started or could not connect."""

    exit_code = 6


class ResourceError(UserError):
    """Insufficient memory, disk space or devices."""

    exit_code = 7


_MOST = 100
"""Maximum number of messages in an error: a hostile file may be wrong in thousands of places."""
_LONGEST = 900
"""Maximum characters of a message, which may contain names and values of hostile files."""
_LONG_WORD = re.compile(r"\d{60,}|[\w.-]{256,}")
"""A number or a word that no file name can be, and that nobody reads to its end."""


def one_line(text: str) -> str:
    """``text`` on one line: shortened, with escapes for unprintable characters, such as in names of hostile files."""
    text = _LONG_WORD.sub(lambda word: f"{word[0][:40]}…", text)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return text if text.isprintable() else escaped(text)


def escaped(text: str, kept: str = "") -> str:
    """``text`` with escapes for unprintable characters, except for those in ``kept``."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def shown(value: object) -> str:
    """The repr of a value for messages, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def reason(error: BaseException) -> str:
    """The first line of an exception's message; of the system's errors, only what is wrong, without number and path."""
    return getattr(error, "strerror", None) or first_line(error)


def unwritable(what: str, error: OSError) -> str:
    """That ``what`` cannot be written, with the file, if it is known, and the reason."""
    name = error.filename
    file = f"{os.fsdecode(name) if isinstance(name, bytes) else name}: " if name else ""
    return f"{what} cannot be written ({file}{error.strerror or error})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or the device is out of memory. Recognizes torch's error without importing torch."""
    is_torch_error = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or is_torch_error or "can't allocate memory" in str(error)


def unusable_path(error: BaseException) -> str | None:
    """A message about a path that is too long or not permitted to be accessed; None for another error."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    if error.errno not in (errno.ENAMETOOLONG, errno.EACCES):
        return None
    advice = " or change its permissions" if error.errno == errno.EACCES else ""
    return one_line(f"{error.filename}: {error.strerror}; name another file{advice}")


_FULL = "free some space, or name a folder on another disk"
_MEMORY = "free memory, or raise ulimit -v"
_THREADS = "raise ulimit -u, or the container's limit of threads"
_ADVICE = {
    errno.EMFILE: "raise ulimit -n",
    errno.ENFILE: "raise the host's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: _MEMORY,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "raise ulimit -f",
    errno.EAGAIN: _THREADS,
}
_ADVICE_BY_TEXT = {
    **{os.strerror(number): advice for number, advice in _ADVICE.items()},
    "can't start new thread": _THREADS,
    "can't allocate memory": _MEMORY,
    "failed to map segment": _MEMORY,  # the dynamic loader
    "No usable temporary directory": "free some space, or set TMPDIR to a folder on another disk",
    # Workers of the DataLoader: by the kernel if memory is short, or shared memory is full.
    "is killed by signal: Killed": "free memory, or use fewer --num-workers",
    "is killed by signal: Bus error": "free memory, or enlarge /dev/shm",
    "exited unexpectedly": "free memory, or use fewer --num-workers",
}


def limit_advice(error: BaseException) -> str | None:
    """What to do about an error of any library that a limit of this host has caused; None for other errors."""
    return next((advice for cause in _causes(error) if (advice := _own_advice(cause))), None)


def failure_of_host(error: BaseException) -> str | None:
    """A message about an error with ``limit_advice``; None for other errors."""
    for cause in _causes(error):
        if advice := _own_advice(cause):
            return f"a limit of this host is reached ({first_line(cause)}): {advice}"
    return None


def limit_reached(file: object, error: BaseException) -> ResourceError | None:
    """The error for a file that cannot be read because of a limit of the host; None for other errors."""
    advice = limit_advice(error)
    return ResourceError(f"{file} cannot be read ({reason(error)}): {advice}") if advice else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that it was raised from; of a failed import also those that it was raised after."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (error.__context__ if isinstance(error, ImportError) else None)


def _own_advice(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, OSError) and error.errno in _ADVICE:
        return _ADVICE[error.errno]
    if not isinstance(error, RuntimeError | ImportError | FileNotFoundError):
        return None
    return next((advice for text, advice in _ADVICE_BY_TEXT.items() if text in first_line(error)), None)


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that is most similar to ``name``, or None if none is similar by ``cutoff``, from 0 to 1.

    If none is very similar, a name that is a prefix of ``name`` is preferred: adam for adamw_torch.
    """
    names = list(names)
    very_similar = difflib.get_close_matches(name, names, n=1, cutoff=max(cutoff, 0.75))
    prefixes = sorted((known for known in names if len(known) > 2 and name.startswith(known)), key=len, reverse=True)
    matches = very_similar or prefixes or difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def counted(number: int, noun: str) -> str:
    """A number with its noun, in singular or plural: ``1 process``, ``2,048 processes``."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def nearest_multiples(number: int, factor: int) -> str:
    """The positive multiples of ``factor`` below and above ``number``, such as ``6 or 8``."""
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str, cutoff: float = 0.6) -> str:
    """The second half of a message about an unknown ``name``: the nearest of ``names``, or what to do ``otherwise``."""
    guess = nearest(name, names, cutoff)
    return f"did you mean {guess}?" if guess else otherwise
