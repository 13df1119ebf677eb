"""What goes wrong by somebody else's hand: one class an exit code, one line a cause."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend. The message says what is wrong, where, and what to do.

    Raised with one message, or with several where several rules are broken at once. The entry
    points print each on a line of its own, without a traceback, and leave with ``exit_code``.
    """

    exit_code = 2
    on_every_rank = False
    """Whether all ranks raise it alike, so that one of them can say it for all."""

    def __init__(self, messages: str | Iterable[str]):
        self.messages = [messages] if isinstance(messages, str) else list(messages)
        super().__init__("\n".join(self.messages))


class ConfigError(UserError):
    """Wrong usage or configuration."""

    exit_code = 2


class DataError(UserError):
    """A data set, vocabulary or index that is missing, broken or too small."""

    exit_code = 3


class CheckpointError(UserError):
    """A checkpoint that is missing, broken or does not fit."""

    exit_code = 4


class NumericsError(UserError):
    """Training that left the numbers, such as a loss that is not finite."""

    exit_code = 5
    on_every_rank = True


class LaunchError(UserError):
    """Ranks that could not be started or could not find each other."""

    exit_code = 6


class ResourceError(UserError):
    """Memory, disk or devices that do not suffice."""

    exit_code = 7


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` most like ``name``, or None where none is much like it."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return matches[0] if matches else None


def did_you_mean(name: str, names: Iterable[str], *, otherwise: str) -> str:
    """The second half of a message about an unknown ``name``: the nearest of ``names``, or what to do ``otherwise``."""
    guess = nearest(name, names)
    return f"did you mean {guess}?" if guess else otherwise
