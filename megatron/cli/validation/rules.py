"""The registry of rules about which settings may be combined. Each rule is one decorated function."""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from megatron.config import RunConfig, flag_fields
from megatron.config.fields import flag_name

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

    def check(self, run: RunConfig) -> str | None:
        """The message for a run that breaks the rule, or None."""
        return next(self.messages(run), None)


RULES: list[Rule] = []
"""All rules, in the order of their definition, which is the order of messages, ``--explain`` and docs/layouts.md."""


def rule(name: str, *, why: str, otherwise: str = "", only_warns: bool = False) -> Callable[[Check], Check]:
    """Register the decorated function, which yields messages, as a rule; see ``Rule`` for the arguments."""

    def register(messages: Check) -> Check:
        RULES.append(Rule(name, why, messages, otherwise, only_warns))
        return messages

    return register


def needs(other: str, *paths: str, only_warns: bool = False) -> None:
    """Register a rule for each setting that has no effect unless ``other`` is set. Paths are ``"section.field"``.

    With ``only_warns``, a run without ``other`` starts with a warning: for settings that the scripts of Megatron-LM
    provide in any case.
    """
    for path in paths:
        _needs(path, other, only_warns)


def _needs(path: str, other: str, only_warns: bool) -> None:
    flag, needed, is_set, is_other_set = _flag(path), _flag(other), _question(path), _question(other)

    @rule(f"{flag} needs {needed}", why="It would be silently ignored otherwise.", only_warns=only_warns)
    def check(run: RunConfig) -> Messages:
        if is_set(run) and not is_other_set(run):
            yield f"{flag} has no effect without {needed}: add {needed}, or remove {flag}"


def excludes(path: str, other: str, *, why: str, otherwise: str = "") -> None:
    """Register a rule for two settings that cannot both be set. Paths are ``"section.field"``."""
    flag, rival, is_set, is_other_set = _flag(path), _flag(other), _question(path), _question(other)

    @rule(f"{flag} excludes {rival}", why=why, otherwise=otherwise)
    def check(run: RunConfig) -> Messages:
        if is_set(run) and is_other_set(run):
            yield f"{flag} and {rival} exclude each other: remove one"


def enabled(settings: Mapping[str, bool]) -> str:
    """The names of the settings that are true, for a message."""
    return " and ".join(name for name, on in settings.items() if on)


def _flag(path: str) -> str:
    return flag_name(flag_fields()[path.split(".")[1]])


def _question(path: str) -> Callable[[RunConfig], bool]:
    """Whether a field differs from its default."""
    value, default = attrgetter(path), flag_fields()[path.split(".")[1]].default
    return lambda run: value(run) != default
