"""The registry of rules about which settings may be combined. Each rule is one decorated function."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from megatron.config import RunConfig, flag_fields
from megatron.config.fields import flag_name

Check: TypeAlias = Callable[[RunConfig], str | None]
"""Returns the message for a run that breaks the rule, or None. The message says what is wrong and what to do."""


class Rule(NamedTuple):
    """A requirement on a run, with its reason."""

    name: str
    why: str
    check: Check
    otherwise: str = ""
    """What DeepSpeed would do with a run that breaks the rule, if that is the reason for it."""


RULES: list[Rule] = []
"""All rules, in the order of their definition, which is the order of messages, ``--explain`` and docs/layouts.md."""


def rule(name: str, *, why: str, otherwise: str = "") -> Callable[[Check], Check]:
    """Register the decorated check as a rule; see ``Rule`` for the arguments."""

    def register(check: Check) -> Check:
        RULES.append(Rule(name, why, check, otherwise))
        return check

    return register


def needs(path: str, other: str) -> None:
    """Register a rule for a setting that has no effect unless another is set. Paths are ``"section.field"``."""
    flag, needed = _flag(path), _flag(other)

    @rule(f"{flag} needs {needed}", why="It would be silently ignored otherwise.")
    def check(run: RunConfig) -> str | None:
        if _is_set(run, path) and not _is_set(run, other):
            return f"{flag} has no effect without {needed}: add {needed}, or remove {flag}"
        return None


def excludes(path: str, other: str, *, why: str, otherwise: str = "") -> None:
    """Register a rule for two settings that cannot both be set. Paths are ``"section.field"``."""
    flag, rival = _flag(path), _flag(other)

    @rule(f"{flag} excludes {rival}", why=why, otherwise=otherwise)
    def check(run: RunConfig) -> str | None:
        if _is_set(run, path) and _is_set(run, other):
            return f"{flag} and {rival} exclude each other: remove one"
        return None


def _flag(path: str) -> str:
    return flag_name(flag_fields()[path.split(".")[1]])


def _is_set(run: RunConfig, path: str) -> bool:
    """Whether a field differs from its default."""
    section, field = path.split(".")
    config = getattr(run, section)
    return getattr(config, field) != getattr(type(config)(), field)
