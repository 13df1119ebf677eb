"""What a flag needs or excludes: rules that the metadata of the config's fields states, checked in one way for all.

See ``megatron.config.fields.flag`` for how a field states them.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass
from typing import Any

from megatron.cli.validation.rules import Messages, Rule
from megatron.config import RunConfig, flag_fields, flag_value
from megatron.config.fields import flag_name, negative_flag

NEEDS, IGNORED, EXCLUDES = "a flag needs another", "a flag has no effect without another", "flags exclude each other"
REASONS = {
    NEEDS: "Without the other it would not work, or would be silently ignored.",
    IGNORED: "Scripts of Megatron-LM give such flags in any case.",
    EXCLUDES: "They contradict each other, or their combination is not supported.",
}
"""The kinds of these rules, which are the rows of docs/layouts.md."""


@dataclass(frozen=True)
class Condition:
    """That the value of a flag is not its default or, if there are ``values``, that it is one of them.

    A switch whose default depends on the run, which is None, has to be on.
    """

    field: Field
    values: tuple[str, ...]

    def holds(self, run: RunConfig) -> bool:
        """Whether it is true of ``run``."""
        value = flag_value(run, self.field.name)
        if self.values:
            return _as_text(value) in self.values
        return value != self.field.default and (value, self.field.default) != (False, None)

    def given(self, run: RunConfig) -> str:
        """The flag as ``run`` has it."""
        return f"{flag_name(self.field)} {_as_text(flag_value(run, self.field.name))}" if self.values else str(self)

    def __str__(self) -> str:
        if not self.values:
            return negative_flag(self.field) if self.field.default is True else flag_name(self.field)
        *others, last = self.values
        return f"{flag_name(self.field)} {', '.join(others)}{' or ' if others else ''}{last}"


@dataclass(frozen=True)
class Relation:
    """What the metadata of a field says of one or more other flags."""

    kind: str
    own: Condition
    others: tuple[Condition, ...]
    """Alternatives, of which one is enough."""
    why: str

    def is_broken(self, run: RunConfig) -> bool:
        """Whether ``run`` contradicts it."""
        has_other = any(other.holds(run) for other in self.others)
        return self.own.holds(run) and has_other == (self.kind == EXCLUDES)

    def message(self, run: RunConfig) -> str:
        """What is wrong with a run that contradicts it, and what to do."""
        given, reason = self.own.given(run), f"{self.why}; " if self.why else ""
        if self.kind == EXCLUDES:
            rival = next(other.given(run) for other in self.others if other.holds(run))
            return f"{given} and {rival} exclude each other: {reason}remove one"
        verb = "needs" if self.kind == NEEDS else "has no effect without"
        return f"{given} {verb} {_either(self.others)}: {reason}add it, or remove {given}"

    @property
    def rule_name(self) -> str:
        """Such as ``--async-save needs --save``."""
        return f"{self.own} {'excludes' if self.kind == EXCLUDES else 'needs'} {_either(self.others)}"


def relation_rules() -> Iterator[Rule]:
    """A rule for each relation that a field states."""
    for field in flag_fields().values():
        needed = [*_relations(field, IGNORED, "ignored_without"), *_relations(field, NEEDS, "needs")]
        for number, relation in enumerate(needed):
            yield _rule(relation, needed[:number])
        for relation in _relations(field, EXCLUDES, "excludes"):
            yield _rule(relation, [])


def _relations(field: Field, kind: str, key: str) -> list[Relation]:
    found = []
    for text, why in field.metadata["flag"][key].items():
        values, _, alternatives = text.rpartition(": ")
        own = condition(f"{field.name}={values}" if values else field.name)
        found.append(Relation(kind, own, _conditions(alternatives), why))
    return found


def condition(text: str) -> Condition:
    """The condition that the metadata of a field writes as ``zero_stage=2|3`` or ``save``."""
    name, _, values = text.partition("=")
    return Condition(flag_fields()[name], tuple(values.split("|")) if values else ())


def conditions_as_text(text: str) -> str:
    """Conditions of the metadata as a user writes them, such as ``--load or --auto-resume``."""
    return _either(_conditions(text))


def _conditions(text: str) -> tuple[Condition, ...]:
    return tuple(map(condition, text.split(" or ")))


def _either(conditions: tuple[Condition, ...]) -> str:
    return " or ".join(map(str, conditions))


def _rule(relation: Relation, earlier: list[Relation]) -> Rule:
    """The rule of ``relation``, which is kept as long as one of the ``earlier`` ones is broken."""

    def messages(run: RunConfig) -> Messages:
        if relation.is_broken(run) and not any(other.is_broken(run) for other in earlier):
            yield relation.message(run)

    return Rule(
        relation.rule_name,
        f"{relation.why[0].upper()}{relation.why[1:]}." if relation.why else REASONS[relation.kind],
        messages,
        only_warns=relation.kind == IGNORED,
        kind=relation.kind,
    )


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
