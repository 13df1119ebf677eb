"""Reads flags: from the words of a command line to the values they give, without looking at what they mean."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, get_args, get_origin

from megatron.config import flag_fields, sections
from megatron.config.command_line.refused import REFUSED_VALUES, refusals
from megatron.config.errors import ConfigError, did_you_mean, nearest
from megatron.config.fields import Provided, flag_name
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec

CONFIG_FILE = "deepspeed_config"
"""Where ``read_flags`` puts the file of ``--deepspeed_config``: the one setting that is no field of a config."""


def read_flags(argv: Sequence[str], architecture: ArchitectureSpec = GPT2) -> tuple[dict[str, Provided], list[str]]:
    """The values that ``argv`` gives, by field, and a message for each flag that is unknown or refused.

    The flags are those of the program that trains ``architecture``. A misspelt flag counts as the one it is nearest to,
    so that what follows from its absence is not reported too. ``--help`` prints and leaves, as argparse does.

    Raises:
        ConfigError: a value is missing or cannot be read; it carries the other messages too.
    """
    parser = build_parser(architecture)
    words, problems = _settle_names(argv, parser, refusals(architecture))
    try:
        namespace, stray = parser.parse_known_args(words, argparse.Namespace(said=[]))
    except ConfigError as error:
        raise ConfigError([*problems, *error.messages]) from None
    problems += [f"unexpected argument {word!r}: every value follows its flag" for word in stray]
    given, faults = _read_values(namespace.said)
    if faults:
        raise ConfigError([*problems, *faults])
    return _drop_repetitions(given, problems), problems


def build_parser(architecture: ArchitectureSpec = GPT2) -> argparse.ArgumentParser:
    """The parser of all flags of a model's program, in one group for each section of the config."""
    parser = _Parser(
        usage="%(prog)s --num-layers N --hidden-size N ... [flags]",
        description=f"Trains {architecture.name} with tensor, pipeline and data parallelism on DeepSpeed.",
        epilog="In names, hyphens and underscores are the same.",
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    launch = parser.add_argument_group("DeepSpeed")
    launch.add_argument(
        "--deepspeed", "--deepscale", action="store_true", help="Accepted: training is always DeepSpeed's."
    )
    launch.add_argument(
        "--deepspeed-config",
        "--deepscale-config",
        action=_Record,
        dest=CONFIG_FILE,
        metavar="FILE",
        help="DeepSpeed's JSON. A setting with a flag may stand in either place; in both, it must be the same.",
    )
    for section in sections().values():
        group = parser.add_argument_group((section.__doc__ or "").rstrip("."))
        for field in fields(section):
            if "flag" in field.metadata and field.metadata["flag"]["masked_lm"] in (None, architecture.masked_lm):
                _add_flag(group, field)
    return parser


def _add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    about = field.metadata["flag"]
    names = [flag_name(field), *("--" + alias.replace("_", "-") for alias in about["aliases"])]
    if _kind(field) is bool:
        group.add_argument(*names, action=_Record, dest=field.name, nargs=0, const=True, help=_help(field))
    else:
        metavar = "|".join(about["choices"]) if about["choices"] else about["metavar"] or _METAVARS[_kind(field)]
        nargs = "+" if get_origin(field.type) is tuple else None
        group.add_argument(*names, action=_Record, dest=field.name, nargs=nargs, metavar=metavar, help=_help(field))
    for value in dict.fromkeys(about["switches"].values()):
        names_of_value = [f"--{name}" for name in about["switches"] if about["switches"][name] == value]
        text = f"The same as {names[0]} {value}." if _kind(field) is not bool else f"The opposite of {names[0]}."
        group.add_argument(*names_of_value, action=_Record, dest=field.name, nargs=0, const=value, help=text)


def _help(field: Field) -> str:
    about = field.metadata["flag"]
    text = about["help"].replace("%", "%%")
    if about["required"]:
        return f"{text} (required)"
    # Off, and "not given", go without saying; so does a default that the text explains itself.
    silent = field.default in (None, MISSING, ()) or isinstance(field.default, bool) or "(default" in text
    if silent or (about["within"] == "[1, inf)" and not field.default):
        return text
    return f"{text} (default: {field.default})"


def _kind(field: Field) -> type:
    """The type of a field's value, without the None of an optional one."""
    return next((kind for kind in get_args(field.type) if kind is not type(None)), field.type)


def _settle_names(
    argv: Sequence[str], parser: argparse.ArgumentParser, refused: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """``argv`` with each flag spelt as the parser knows it, and a message for each flag it does not know."""
    known = {name for action in parser._actions for name in action.option_strings}
    words: list[str] = []
    problems: list[str] = []
    dropping = False
    for word in argv:
        if not _is_flag(word):
            if not dropping:
                words.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        meant = name if name in known else None
        if meant is None and name.removeprefix("--") in refused:
            problems.append(f"{name}: {refused[name.removeprefix('--')]}")
        elif meant is None:
            meant = nearest(name, known)
            problems.append(f"unknown flag {name}: {did_you_mean(name, known, otherwise='see --help')}")
        dropping = meant is None
        if meant is not None:
            words.append(meant + equals + value)
    return words, problems


def _is_flag(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _read_values(said: list[tuple[str, str, Any, bool]]) -> tuple[list[tuple[str, str, Provided]], list[str]]:
    """Each (field, name, text, is switch) with its value read, and a message for each that cannot be read."""
    every_field = flag_fields()
    given: list[tuple[str, str, Provided]] = []
    faults: list[str] = []
    for name, flag, value, is_switch in said:
        words = " ".join(value) if isinstance(value, list) else value
        source = flag if is_switch else f"{flag} {words or repr(words)}"
        try:
            if not is_switch:
                value = _read_value(every_field[name], value) if name in every_field else _text(value)
        except ValueError as error:
            faults.append(f"{source}: {error}")
        else:
            given.append((name, flag, Provided(value, source)))
    return given, faults


def _read_value(field: Field, text: str | list[str]) -> Any:
    """The value of ``text`` for ``field``. Raises ValueError with what is wrong."""
    if isinstance(text, list):
        return tuple(map(_READERS[_kind(field)], text))
    choices = field.metadata["flag"]["choices"]
    if (field.name, text) in REFUSED_VALUES:
        raise ValueError(REFUSED_VALUES[field.name, text])
    if choices and text not in choices:
        raise ValueError(did_you_mean(text, choices, otherwise=f"choose from {', '.join(choices)}"))
    return _READERS[_kind(field)](text)


def _drop_repetitions(given: list[tuple[str, str, Provided]], problems: list[str]) -> dict[str, Provided]:
    """One value for each field. A flag's later value wins; another of its names must not say another thing."""
    settled: dict[str, Provided] = {}
    flags: dict[str, str] = {}
    for name, flag, value in given:
        if name in settled and flags[name] != flag and settled[name].value != value.value:
            problems.append(f"{settled[name].source} and {value.source} set the same thing: remove one")
        settled[name], flags[name] = value, flag
    return settled


_LARGEST = 2**53
"""Whole numbers up to here are exact, whichever way they are written."""


def _whole(text: str) -> int:
    number = _number(text)
    if abs(number) > _LARGEST:
        raise ValueError(f"must be {_LARGEST} at most")
    if number != int(number):
        raise ValueError("must be a whole number")
    # Through float only where there is a point or an exponent: large seeds would lose digits.
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
_METAVARS = {int: "N", float: "X", str: "TEXT"}


_ARGPARSE_WORDS = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs a value",
    "ignored explicit argument": "takes no value: remove",
}


class _Record(argparse.Action):
    """Keeps field, flag, text, and whether it is a switch, of each flag given.

    Texts are read afterwards, so that no fault hides another.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        is_switch = self.nargs == 0
        namespace.said.append((self.dest, option_string, self.const if is_switch else values, is_switch))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line, no usage."""

    def error(self, message: str) -> NoReturn:
        for words, ours in _ARGPARSE_WORDS.items():
            message = message.replace(words, ours)
        raise ConfigError(message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    """Shows all names of a flag on one line, with its value once at the end."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {action.metavar}"
