"""Rules about which settings may be combined: registered functions, and relations declared by config fields.

"X needs Y" and "X excludes Y" are metadata of the fields (see ``megatron.config.fields.flag``), all checked by
``relation_rules``. A rule that compares or computes values is a function decorated with ``@rule``.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass
from typing import Any, NamedTuple, TypeAlias

from megatron.common.errors import nearest_multiples
from megatron.config import RunConfig, flag_fields, flag_value
from megatron.config.fields import flag_name, flag_of, negative_flag, with_reasons
from megatron.model.spec import architecture_of

Messages: TypeAlias = Iterator[str]
"""Messages of one rule: what is wrong with a run, and what to do. Only the first message is used."""
Check: TypeAlias = Callable[[RunConfig], Messages]


class Rule(NamedTuple):
    """A requirement on a run, with its reason."""

    name: str
    why: str
    messages: Check
    otherwise: str = ""
    """What DeepSpeed would do with a run that breaks the rule, if that is the reason for it."""
    only_warns: bool = False
    """Whether breaking the rule is only a warning, since the setting is harmless and has no effect."""
    kind: str = ""
    """Rules of one kind share a row of docs/layouts.md; empty for a rule with its own row."""
    of_transformers: bool = False
    """Whether the rule does not apply to a user's own model (``pretrain``), which may interpret sizes differently."""
    fields: frozenset[str] = frozenset()
    """The fields of a rule that a field declares."""

    def check(self, run: RunConfig) -> str | None:
        """The message for a run that breaks the rule, or None."""
        if self.of_transformers and architecture_of(run.model).provider is not None:
            return None
        return next(self.messages(run), None)


FUNCTIONS: list[Rule] = []
"""The rules that are functions, in the order of their definition."""


def rule(*, otherwise: str = "", only_warns: bool = False, of_transformers: bool = False) -> Callable[[Check], Check]:
    """Register the decorated function, which yields messages, as a rule; see ``Rule`` for the arguments.

    The first sentence of its docstring is the rule's name, the others say why.
    """

    def register(messages: Check) -> Check:
        name, _, why = " ".join((messages.__doc__ or "").split()).partition(". ")
        FUNCTIONS.append(Rule(name, why, messages, otherwise, only_warns, of_transformers=of_transformers))
        return messages

    return register


def enabled(settings: Mapping[str, bool]) -> str:
    """The names of the settings that are true, for a message."""
    return " and ".join(name for name, on in settings.items() if on)


def multiple(name: str, number: int, factors: str, factor: int) -> Messages:
    """A message unless ``number`` is a multiple of ``factor``; ``factors`` names the flags of the factor."""
    if not divides(factor, number):
        yield f"{name} {number} is not a multiple of {factors}: use {nearest_multiples(number, factor)}"


def divides(small: int, large: int) -> bool:
    """Whether ``small`` divides ``large``; also true if either is out of range, which is reported elsewhere."""
    return small < 1 or large < 1 or large % small == 0


NEEDS, IGNORED, EXCLUDES = "a flag needs another", "a flag has no effect without another", "flags exclude each other"
MULTIPLE = "a size is a multiple of another"
REASONS = {
    MULTIPLE: "Each rank holds an equal share of a layer, complete heads, and the same number of experts.",
    NEEDS: "Without the other it would not work, or would be silently ignored.",
    IGNORED: "Scripts for Megatron-LM often give such flags.",
    EXCLUDES: "They contradict each other, or their combination is not supported.",
}
"""Kinds of rules that fields declare, and the default reason of each kind."""


@dataclass(frozen=True)
class Condition:
    """A condition on a flag: its value is one of ``values`` or, without ``values``, not the default.

    A boolean flag whose default is None (it depends on the run) has to be on.
    """

    field: Field
    values: tuple[str, ...]

    def holds(self, run: RunConfig) -> bool:
        """Whether ``run`` meets the condition."""
        value = flag_value(run, self.field.name)
        if self.values:
            return _as_text(value) in self.values
        return value != self.field.default and (value, self.field.default) != (False, None)

    def given(self, run: RunConfig) -> str:
        """The flag with its value in ``run``, for messages."""
        return f"{flag_name(self.field)} {_as_text(flag_value(run, self.field.name))}" if self.values else str(self)

    def __str__(self) -> str:
        if not self.values:
            return negative_flag(self.field) if self.field.default is True else flag_name(self.field)
        *others, last = self.values
        return f"{flag_name(self.field)} {', '.join(others)}{' or ' if others else ''}{last}"


def condition(text: str) -> Condition:
    """Parse a condition in the metadata of a field, such as ``zero_stage=2|3`` or ``save``."""
    name, _, values = text.partition("=")
    return Condition(flag_fields()[name], tuple(values.split("|")) if values else ())


def conditions_as_text(text: str) -> str:
    """Conditions in the metadata of a field, in terms of flags, such as ``--load or --auto-resume``."""
    return " or ".join(str(condition(part)) for part in text.split(" or "))


def relation_rules() -> Iterator[Rule]:
    """A rule for each relation that a field declares; only the first unmet need of a field is reported."""
    for field in flag_fields().values():
        flag = flag_of(field)
        yield from (_multiple(field, flag_fields()[name]) for name in with_reasons(flag.multiple_of))
        earlier: list[Rule] = []
        for kind, key in ((IGNORED, "ignored_without"), (NEEDS, "needs"), (EXCLUDES, "excludes")):
            for text, why in with_reasons(getattr(flag, key)).items():
                relation = _relation(field, kind, text, why, () if kind == EXCLUDES else tuple(earlier))
                earlier.append(relation)
                yield relation


def _multiple(field: Field, other: Field) -> Rule:
    """The rule that the value of ``field`` is a multiple of the value of ``other``."""
    name, factors = flag_name(field), flag_name(other)

    def messages(run: RunConfig) -> Messages:
        if run.model.vision_num_layers or flag_of(field).models != "llava":
            factor = flag_value(run, other.name)
            yield from multiple(name, flag_value(run, field.name), f"{factors} {factor}", factor)

    title = f"{name} is a multiple of {factors}"
    return Rule(title, REASONS[MULTIPLE], messages, kind=MULTIPLE, of_transformers=True)


def _relation(field: Field, kind: str, text: str, why: str, earlier: tuple[Rule, ...]) -> Rule:
    """The rule that ``field`` declares as ``text``. It does not report if one of the ``earlier`` rules is broken."""
    values, _, alternatives = text.rpartition(": ")
    applies = condition(f"{field.name}={values}" if values else field.name)
    others = tuple(map(condition, alternatives.split(" or ")))
    reason = f"{why}; " if why else ""

    def messages(run: RunConfig) -> Messages:
        met = [other for other in others if other.holds(run)]
        if not applies.holds(run) or bool(met) != (kind == EXCLUDES) or any(rule.check(run) for rule in earlier):
            return
        given = applies.given(run)
        if kind == EXCLUDES:
            yield f"{given} and {met[0].given(run)} exclude each other: {reason}remove one"
        else:
            verb = "needs" if kind == NEEDS else "has no effect without"
            yield f"{given} {verb} {conditions_as_text(alternatives)}: {reason}add it, or remove {given}"

    return Rule(
        f"{applies} {'excludes' if kind == EXCLUDES else 'needs'} {conditions_as_text(alternatives)}",
        f"{why[0].upper()}{why[1:]}." if why else REASONS[kind],
        messages,
        only_warns=kind == IGNORED,
        kind=kind,
        of_transformers=field.name == "vocab_size",
        fields=frozenset({field.name, *(other.field.name for other in others)}),
    )


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
