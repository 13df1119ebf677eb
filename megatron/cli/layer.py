"""One source of flags, such as a command line: from its words to a value for each field.

Names are accepted with hyphens or underscores. Flags that only Megatron-LM knows are replaced, ignored or refused.
"""

import argparse
from collections.abc import Collection, Iterable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from megatron.cli.classic_flags import Outcome, outcome_of
from megatron.cli.parser import has_flag, names_of
from megatron.cli.values import read_value
from megatron.common.errors import ConfigError, did_you_mean
from megatron.config import flag_fields
from megatron.config.fields import Provided, Source
from megatron.model.architectures import BERT, GPT2, T5
from megatron.model.spec import ArchitectureSpec

_Given: TypeAlias = tuple[str, str, Provided]
"""Field, flag and value."""

NEAR = 0.8
"""Similarity from which on a known flag is suggested for an unknown one."""


class Setting(NamedTuple):
    """A flag with its value, from another source than the command line."""

    name: str
    """Of the flag, with hyphens or underscores."""
    value: bool | str | list[str]
    place: str
    """The file and the line, for messages."""


@dataclass
class Layer:
    """What one source gives."""

    words: list[str] = field(default_factory=list)
    """As arguments of a command line, with the names that the parser knows."""
    values: dict[str, Provided] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """A message for each value that is missing or cannot be parsed."""
    warnings: list[str] = field(default_factory=list)


def read_layer(
    sources: Iterable[tuple[Sequence[str], str]], parser: argparse.ArgumentParser, architecture: ArchitectureSpec
) -> Layer:
    """The layer of one or more command lines, each with the place that messages name; empty for the real one."""
    layer = Layer()
    provided: list[_Given] = []
    for argv, place in sources:
        at = f"{place}: " if place else ""
        words, problems, warnings = _normalize_names(argv, parser, architecture)
        layer.words += words
        layer.warnings += [at + warning for warning in warnings]
        try:
            namespace, extra = parser.parse_known_args(words, argparse.Namespace(occurrences=[]))
        except ConfigError as error:
            layer.unreadable += [at + message for message in error.messages]
        else:
            problems += [f"unexpected argument {word!r}: every value follows its flag" for word in extra]
            provided += _read_values(namespace.occurrences, place, layer.unreadable)
        layer.problems += [at + problem for problem in problems]
    layer.values = _merge_repetitions(_without_single_stage(provided), layer)
    return layer


class _Words(NamedTuple):
    """The arguments with all flags as the parser knows them, and a message for each flag that it does not know."""

    words: list[str]
    problems: list[str]
    warnings: list[str]


def _normalize_names(argv: Sequence[str], parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> _Words:
    """``argv`` for ``parser``. Unknown and unsupported flags are removed with their values."""
    known = {name for action in parser._actions for name in action.option_strings}
    others = flags_of_other_models(architecture)
    result = _Words([], [], [])
    for word, *values in _grouped(argv):
        name, equals, value = word.partition("=")
        name = known_name(name, known)
        values = [value, *values] if equals else values
        if not is_flag(word):
            result.words.extend([word, *values])
        elif name in known:
            result.words.extend([f"{name}={values[0]}", *values[1:]] if equals else [name, *values])
        elif name in others:
            result.problems.append(f"{name}: {others[name]}")
        elif outcome := outcome_of(name.removeprefix("--"), values):
            _apply(outcome, name, values, result)
        else:
            guess = did_you_mean(name, known, otherwise="see --help", cutoff=NEAR)
            result.problems.append(f"unknown flag {name}: {guess}")
    return result


def known_name(name: str, known: Collection[str]) -> str:
    """The one of ``known`` that is ``name`` but for hyphens and underscores; without one ``name`` with hyphens."""
    hyphens = name.replace("_", "-")
    return hyphens if hyphens in known else next((one for one in known if one.replace("_", "-") == hyphens), hyphens)


def _grouped(argv: Sequence[str]) -> list[list[str]]:
    """Each flag with the words that follow it up to the next flag; the words before the first flag are a group, too."""
    groups: list[list[str]] = []
    for word in argv:
        if is_flag(word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return groups


def _apply(outcome: Outcome, name: str, values: Sequence[str], result: _Words) -> None:
    """Add to ``result`` what becomes of the classic flag ``name`` with ``values``."""
    if outcome.kind == "replaced":
        result.words.extend(outcome.text.split())
    elif outcome.kind == "ignored":
        result.warnings.append(f"{' '.join([name, *values])} has no effect: {outcome.text}")
    elif outcome.kind == "refused":
        result.problems.append(f"{name}: {outcome.text}")


def flags_of_other_models(architecture: ArchitectureSpec) -> dict[str, str]:
    """The flags that the program of ``architecture`` refuses since they are those of other models, with the message."""
    others = [field for field in flag_fields().values() if not has_flag(field, architecture)]
    return {
        name: f"{architecture.program} has no such flag: it is {_owner(field)}"
        for field in others
        for name in names_of(field)
    }


def _owner(field: Field) -> str:
    """The model and the program that have the flag of ``field``, which not all have."""
    metadata = field.metadata["flag"]
    if metadata["masked_lm"] is None and metadata["encoder_decoder"] is None:
        return "for pretraining"
    owner = T5 if metadata["encoder_decoder"] == "only" else BERT if metadata["masked_lm"] else GPT2
    return f"{owner.name}'s, for {owner.program}"


def is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
        return False
    except ValueError:
        return True


def _read_values(occurrences: Iterable[tuple[str, str, Any, bool]], place: str, unreadable: list[str]) -> list[_Given]:
    """The value of each occurrence, which is field, flag, text, and whether the flag is a switch.

    Adds a message to ``unreadable`` for each value that cannot be parsed.
    """
    provided: list[_Given] = []
    for name, flag, value, is_switch in occurrences:
        words = " ".join(value) if isinstance(value, list) else value
        source = Source(flag if is_switch else f"{flag} {words or repr(words)}", place)
        try:
            if not is_switch:
                value = read_value(flag_fields()[name] if name in flag_fields() else None, value)
        except ValueError as error:
            unreadable.append(f"{source}: {error}")
        else:
            provided.append((name, flag, Provided(value, source)))
    return provided


def _without_single_stage(occurrences: list[_Given]) -> list[_Given]:
    """Without a pipeline size of 1 next to --no-pipeline-parallel: the scripts of Megatron-DeepSpeed give both."""
    if all(flag != "--no-pipeline-parallel" for _, flag, _ in occurrences):
        return occurrences
    return [given for given in occurrences if (given[0], given[2].value) != ("pipe_parallel_size", 1)]


def _merge_repetitions(occurrences: list[_Given], layer: Layer) -> dict[str, Provided]:
    """One value for each field; ``layer`` gets a warning for each value that a later one of the same flag replaces.

    The last value counts, so that the flags a user appends to a script replace the script's; aliases must not
    contradict each other.
    """
    values: dict[str, Provided] = {}
    flags: dict[str, str] = {}
    for name, flag, value in occurrences:
        before = values.get(name)
        if before is not None and before.value != value.value:
            if flags[name] == flag:
                layer.warnings.append(f"{before.source} has no effect: {value.source} follows it")
            else:
                layer.problems.append(f"{before.source} and {value.source} set the same thing: remove one")
        values[name], flags[name] = value, flag
    return values
