"""Builds the argument parser of a program, and its help, from the fields of the config."""

import argparse
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from inspect import get_annotations
from typing import Any, NoReturn, get_origin

from megatron.cli.provided import typed_number, value_type
from megatron.cli.validation.rules import conditions_as_text
from megatron.common.errors import ConfigError
from megatron.config import sections
from megatron.config.fields import flag_name, flag_of, has_flag, negative_flag, with_reasons
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec

CONFIG_FILE = "deepspeed_config"
"""The key of ``--deepspeed_config`` in the result of ``read_flags``; the only one that is not a config field."""
SETTINGS_FILE = "config"
"""The name of ``--config``, whose settings are a layer below the command line."""

_METAVARS = {int: "N", float: "X", str: "TEXT"}


def build_parser(architecture: ArchitectureSpec = GPT2) -> argparse.ArgumentParser:
    """The parser of all flags of the program that trains ``architecture``."""
    model = architecture.name if architecture.provider is None else f"the model of {architecture.program}"
    parser = _Parser(
        usage="%(prog)s --num-layers N --hidden-size N ... [flags]",
        description=f"Trains {model} with tensor, pipeline and data parallelism on DeepSpeed.",
        epilog="Flags may be written with hyphens or underscores. If a flag is repeated, the last value is used, "
        "with a warning. --no-FLAG turns off what --config turns on.",
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument_group("Settings file").add_argument(
        f"--{SETTINGS_FILE}",
        action=ConfigFlag,
        dest=SETTINGS_FILE,
        metavar="FILE",
        help="File of settings (YAML): a line FLAG: VALUE for each flag. Flags on the command line override it.",
    )
    launch = parser.add_argument_group("DeepSpeed")
    launch.add_argument(
        "--deepspeed",
        "--deepscale",
        action="store_true",
        help="Accepted for compatibility: training always uses DeepSpeed.",
    )
    launch.add_argument(
        "--deepspeed-config",
        "--deepscale-config",
        action=ConfigFlag,
        dest=CONFIG_FILE,
        metavar="FILE",
        help="DeepSpeed config file (JSON). A setting with a flag may be given in either place, or with the same value "
        "in both.",
    )
    _add_fields(parser, architecture)
    if architecture.provider is not None:
        architecture.provider.extend(parser)
    return parser


def _add_fields(parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> None:
    """Add the flags of all config fields, grouped by the dataclass that declares them."""
    for section in sections().values():
        for part in filter(is_dataclass, section.__mro__):
            group = parser.add_argument_group((part.__doc__ or "").rstrip("."))
            declared = get_annotations(part)
            for field in fields(part):
                if field.name in declared and "flag" in field.metadata and has_flag(field, architecture.kinds):
                    _add_flag(group, field)


def _add_flag(group: argparse._ArgumentGroup, field: Field) -> None:
    flag = flag_of(field)
    names = names_of(field)
    if value_type(field) is bool:
        group.add_argument(*names, action=ConfigFlag, dest=field.name, nargs=0, const=True, help=_help(field))
    else:
        metavar = flag.metavar or "|".join(flag.choices or ()) or _METAVARS[value_type(field)]
        nargs = "+" if get_origin(field.type) is tuple else None
        group.add_argument(*names, action=ConfigFlag, dest=field.name, nargs=nargs, metavar=metavar, help=_help(field))
    for value in dict.fromkeys(flag.switches.values()):
        names_of_value = [f"--{name}" for name in flag.switches if flag.switches[name] == value]
        text = f"Same as {names[0]} {value}." if value_type(field) is not bool else f"Disable {names[0]}."
        group.add_argument(*names_of_value, action=ConfigFlag, dest=field.name, nargs=0, const=value, help=text)
    if value_type(field) is bool and negative_flag(field).removeprefix("--") not in flag.switches:
        negative = [name.replace("--", "--no-", 1) for name in names]
        text = f"Disable {names[0]}." if field.default is not False else argparse.SUPPRESS
        group.add_argument(*negative, action=ConfigFlag, dest=field.name, nargs=0, const=False, help=text)


def names_of(field: Field) -> list[str]:
    """The flag of a field and its aliases."""
    return [flag_name(field), *("--" + alias.replace("_", "-") for alias in flag_of(field).aliases)]


def _help(field: Field) -> str:
    flag = flag_of(field)
    text = flag.help.replace("%", "%%")
    if needed := [conditions_as_text(needed) for needed in with_reasons(flag.needs) if ": " not in needed]:
        text += f" Needs {' and '.join(needed)}."
    if flag.required:
        return f"{text} (required)"
    # The defaults "off" and "not set" are obvious, and some texts explain their default themselves.
    omitted = field.default in (None, MISSING, ()) or isinstance(field.default, bool) or "(default" in text
    if omitted or (flag.within == "[1, inf)" and not field.default):
        return text
    return f"{text} (default: {field.default})"


class ConfigFlag(argparse.Action):
    """A flag of the config. ``layer`` parses it instead of argparse, so that all errors are reported at once."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("argparse parses only the flags that programs add")


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError with one line, instead of printing the usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for kind in (int, float):  # of the flags that programs add
            self.register("type", kind, partial(typed_number, kind))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class _Help(argparse.HelpFormatter):
    """Lists all names of a flag on one line, followed by its metavar once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        default = "|".join(map(str, action.choices or ())) or action.dest.upper()  # for flags that a program adds
        return names if action.nargs == 0 else f"{names} {action.metavar or default}"
