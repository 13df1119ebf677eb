"""The registry of rules about which settings may be combined.

"X needs Y" and "X excludes Y" are metadata of the config's fields: see ``relations``. A rule that compares or computes
values is a decorated function.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from megatron.config import RunConfig

Messages: TypeAlias = Iterator[str]
"""What is wrong with a run by one rule, and what to do. Only the first message is used."""
Check: TypeAlias = Callable[[RunConfig], Messages]


class Rule(NamedTuple):
    """A requirement on a run, with its reason."""

    name: str
    why: str
    messages: Check
    otherwise: str = ""
    """What DeepSpeed would do with a run that breaks the rule, if that is the reason for it."""
    only_warns: bool = False
    """Whether a run that breaks the rule starts with a warning, since the setting is harmless and has no effect."""
    kind: str = ""
    """Rules of one kind are one row of docs/layouts.md; empty for a rule with its own row."""

    def check(self, run: RunConfig) -> str | None:
        """The message for a run that breaks the rule, or None."""
        return next(self.messages(run), None)


FUNCTIONS: list[Rule] = []
"""The rules that are functions, in the order of their definition."""


def rule(name: str, *, why: str, otherwise: str = "", only_warns: bool = False) -> Callable[[Check], Check]:
    """Register the decorated function, which yields messages, as a rule; see ``Rule`` for the arguments."""

    def register(messages: Check) -> Check:
        FUNCTIONS.append(Rule(name, why, messages, otherwise, only_warns))
        return messages

    return register


def enabled(settings: Mapping[str, bool]) -> str:
    """The names of the settings that are true, for a message."""
    return " and ".join(name for name, on in settings.items() if on)
