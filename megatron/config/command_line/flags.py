"""From command-line arguments to a value for each field of the config."""

import argparse
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field
from typing import Any, NamedTuple, TypeAlias

from megatron.config import flag_fields
from megatron.config.command_line.classic_flags import Outcome, outcome_of
from megatron.config.command_line.parser import build_parser, has_flag, names_of, value_type
from megatron.config.errors import ConfigError, did_you_mean
from megatron.config.fields import Provided
from megatron.config.reading import unreadable_words
from megatron.model.architectures import BERT, GPT2
from megatron.model.spec import ArchitectureSpec

_Occurrence: TypeAlias = tuple[str, str, Any, bool]
"""Field, flag, text, and whether the flag is a switch."""

_NEAR = 0.8
"""Similarity from which on a known flag is suggested for an unknown one."""

REFUSED_VALUES: dict[tuple[str, str], str] = {
    ("data_impl", "lazy"): "convert the data with tools/preprocess_data.py",
    ("data_impl", "cached"): "convert the data with tools/preprocess_data.py",
}
"""Field and value to the reason why that value of an accepted flag is refused."""


class Flags(NamedTuple):
    """The values of a command line."""

    values: dict[str, Provided]
    """By field."""
    problems: list[str]
    """A message for each flag that is unknown or refused, or contradicts another."""
    warnings: list[str]
    """A message for each flag that has no effect."""


def read_flags(argv: Sequence[str], architecture: ArchitectureSpec = GPT2) -> Flags:
    """The values in ``argv``, with a message for each flag that is unknown, refused or without effect.

    The flags are those of the program that trains ``architecture``. ``--help`` prints the help and exits.

    Raises:
        ConfigError: a value is missing or cannot be parsed; it contains the other messages too.
    """
    if unreadable := unreadable_words(argv):
        raise ConfigError(unreadable)
    parser = build_parser(architecture)
    words, problems, warnings = _normalize_names(argv, parser, architecture)
    try:
        namespace, extra = parser.parse_known_args(words, argparse.Namespace(occurrences=[]))
    except ConfigError as error:
        raise ConfigError([*problems, *error.messages]) from None
    problems += [f"unexpected argument {word!r}: every value follows its flag" for word in extra]
    provided, unreadable = _read_values(namespace.occurrences)
    if unreadable:
        raise ConfigError([*problems, *unreadable])
    values, replaced = _merge_repetitions(_without_single_stage(provided), problems)
    return Flags(values, problems, warnings + replaced)


def read_extra_args(argv: Sequence[str], architecture: ArchitectureSpec) -> dict[str, Any]:
    """The values of the flags that the program of a provided model has added. Call ``read_flags`` before.

    Raises ConfigError if a value is no JSON, since checkpoints contain them.
    """
    parser = build_parser(architecture)
    words = _normalize_names(argv, parser, architecture).words
    namespace, _ = parser.parse_known_args(words, argparse.Namespace(occurrences=[]))
    values = {name: value for name, value in vars(namespace).items() if name not in ("occurrences", "deepspeed")}
    for name, value in values.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(
                f"the value of {name}, a flag of {architecture.program}, is a {type(value).__name__}, which JSON does "
                "not have: let its type be str, int, float or bool"
            ) from None
    return values


def with_defaults(argv: Sequence[str], architecture: ArchitectureSpec) -> list[str]:
    """``argv`` after the default flags of a provided model, without those that ``argv`` contains.

    Raises ConfigError if there is no such flag.
    """
    if architecture.provider is None:
        return list(argv)
    parser = build_parser(architecture)
    actions = {name: action for action in parser._actions for name in action.option_strings}
    given = [actions.get(_known_name(word.partition("=")[0], actions)) for word in argv if _is_flag(word)]
    words: list[str] = []
    for key, value in architecture.provider.defaults.items():
        name = _known_name(f"--{key}", actions)
        if name not in actions:
            raise ConfigError(f"args_defaults: there is no flag {name}: {did_you_mean(name, actions, otherwise='-')}")
        if actions[name] in given or value is None or value is False:
            continue
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        words += [name, *map(str, values)]
    return [*words, *argv]


class _Words(NamedTuple):
    """The arguments with all flags as the parser knows them, and a message for each flag that it does not know."""

    words: list[str]
    problems: list[str]
    warnings: list[str]


def _normalize_names(argv: Sequence[str], parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> _Words:
    """``argv`` for ``parser``. Unknown and unsupported flags are removed with their values."""
    known = {name for action in parser._actions for name in action.option_strings}
    others = _flags_of_other_models(architecture)
    result = _Words([], [], [])
    for word, *values in _grouped(argv):
        name, equals, value = word.partition("=")
        name = _known_name(name, known)
        values = [value, *values] if equals else values
        if not _is_flag(word):
            result.words.extend([word, *values])
        elif name in known:
            result.words.extend([f"{name}={values[0]}", *values[1:]] if equals else [name, *values])
        elif name in others:
            result.problems.append(f"{name}: {others[name]}")
        elif outcome := outcome_of(name.removeprefix("--"), values):
            _apply(outcome, name, values, result)
        else:
            guess = did_you_mean(name, known, otherwise="see --help", cutoff=_NEAR)
            result.problems.append(f"unknown flag {name}: {guess}")
    return result


def _known_name(name: str, known: Collection[str]) -> str:
    """The one of ``known`` that is ``name`` but for hyphens and underscores; without one ``name`` with hyphens."""
    hyphens = name.replace("_", "-")
    return hyphens if hyphens in known else next((one for one in known if one.replace("_", "-") == hyphens), hyphens)


def _grouped(argv: Sequence[str]) -> list[list[str]]:
    """Each flag with the words that follow it up to the next flag; the words before the first flag are a group, too."""
    groups: list[list[str]] = []
    for word in argv:
        if _is_flag(word) or not groups:
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


def _flags_of_other_models(architecture: ArchitectureSpec) -> dict[str, str]:
    """The flags that the program of ``architecture`` refuses since they are those of other models, with the message."""
    others = [field for field in flag_fields().values() if not has_flag(field, architecture)]
    return {
        name: f"{architecture.program} has no such flag: it is {_owner(field)}"
        for field in others
        for name in names_of(field)
    }


def _owner(field: Field) -> str:
    """The model and the program that have the flag of ``field``, which not all have."""
    masked_lm = field.metadata["flag"]["masked_lm"]
    if masked_lm is None:
        return "for pretraining"
    owner = BERT if masked_lm else GPT2
    return f"{owner.name}'s, for {owner.program}"


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
        return False
    except ValueError:
        return True


def _read_values(occurrences: list[_Occurrence]) -> tuple[list[tuple[str, str, Provided]], list[str]]:
    """Field, flag and parsed value of each occurrence, and a message for each value that cannot be parsed."""
    every_field = flag_fields()
    provided: list[tuple[str, str, Provided]] = []
    problems: list[str] = []
    for name, flag, value, is_switch in occurrences:
        words = " ".join(value) if isinstance(value, list) else value
        source = flag if is_switch else f"{flag} {words or repr(words)}"
        try:
            if not is_switch:
                value = _read_value(every_field[name], value) if name in every_field else _text(value)
        except ValueError as error:
            problems.append(f"{source}: {error}")
        else:
            provided.append((name, flag, Provided(value, source)))
    return provided, problems


def _read_value(field: Field, text: str | list[str]) -> Any:
    """The value of ``text`` for ``field``. Raises ValueError if it cannot be parsed."""
    if isinstance(text, list):
        return tuple(map(_READERS[value_type(field)], text))
    choices = field.metadata["flag"]["choices"]
    if (field.name, text) in REFUSED_VALUES:
        raise ValueError(REFUSED_VALUES[field.name, text])
    if choices and text not in choices:
        raise ValueError(did_you_mean(text, choices, otherwise=f"choose from {', '.join(choices)}"))
    return _READERS[value_type(field)](text)


def _without_single_stage(occurrences: list[tuple[str, str, Provided]]) -> list[tuple[str, str, Provided]]:
    """Without a pipeline size of 1 next to --no-pipeline-parallel: the scripts of Megatron-DeepSpeed give both."""
    if all(flag != "--no-pipeline-parallel" for _, flag, _ in occurrences):
        return occurrences
    return [given for given in occurrences if (given[0], given[2].value) != ("pipe_parallel_size", 1)]


def _merge_repetitions(
    occurrences: list[tuple[str, str, Provided]], problems: list[str]
) -> tuple[dict[str, Provided], list[str]]:
    """One value for each field, and a warning for each value that a later one of the same flag replaces.

    The last value counts, so that the flags a user appends to a script replace the script's; aliases must not
    contradict each other.
    """
    values: dict[str, Provided] = {}
    flags: dict[str, str] = {}
    warnings: list[str] = []
    for name, flag, value in occurrences:
        before = values.get(name)
        if before is not None and before.value != value.value:
            if flags[name] == flag:
                warnings.append(f"{before.source} has no effect: {value.source} follows it")
            else:
                problems.append(f"{before.source} and {value.source} set the same thing: remove one")
        values[name], flags[name] = value, flag
    return values, warnings


_LARGEST = 2**53
"""Up to here, whole numbers are exact as floats."""


def _whole(text: str) -> int:
    number = _number(text)
    if abs(number) > _LARGEST:
        raise ValueError(f"must be {_LARGEST} at most")
    if number != int(number):
        raise ValueError("must be a whole number")
    # Through float only if there is a point or an exponent: large seeds would lose digits.
    return int(text) if text.strip("+-").isdecimal() else int(number)


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


_READERS: dict[type, Callable[[str], Any]] = {int: _whole, float: _number, str: _text}
