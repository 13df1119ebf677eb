"""Reads one source of flags, such as a command line or a settings file, into one value for each config field.

Flags may be written with hyphens or underscores. Classic flags that do not exist here are replaced, ignored or refused.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field
from typing import NamedTuple

from megatron.cli.classic_flags import outcome_of
from megatron.cli.parser import SETTINGS_FILE, ConfigFlag, names_of
from megatron.cli.provided import Provided, Source, read_value
from megatron.common.errors import did_you_mean
from megatron.config import flag_fields
from megatron.config.fields import flag_name, flag_of, has_flag, negative_flag
from megatron.model.architectures import BERT, GPT2, LLAVA, T5
from megatron.model.spec import ArchitectureSpec

_NEAR = 0.8
"""Minimum similarity at which a known flag is suggested for an unknown one."""
_OF_OTHER_LIBRARIES = {
    "--learning-rate": "--lr",
    "--max-steps": "--train-iters",
    "--output-dir": "--save",
    "--per-device-train-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "--gas",
    "--warmup-steps": "--lr-warmup-iters",
    "--max-grad-norm": "--clip-grad",
}
"""Flags of other libraries to the flag to suggest. They are not replaced, since units of the values may differ."""


class Given(NamedTuple):
    """A flag and its unparsed value, from one source."""

    name: str
    """The flag with its dashes; without dashes it is an argument that follows no flag."""
    value: bool | str | list[str]
    """The arguments after the flag on a command line; in a settings file a boolean, a string or a list."""
    place: str = ""
    """The source, for messages; empty for the command line."""

    @property
    def at(self) -> str:
        """Prefix of messages about this flag."""
        return f"{self.place}: " if self.place else ""

    @property
    def arguments(self) -> list[str]:
        """The value as command-line arguments."""
        return [] if isinstance(self.value, bool) else [self.value] if isinstance(self.value, str) else self.value


@dataclass
class Layer:
    """The values and messages from one source of flags."""

    values: dict[str, Provided] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """A message for each value that is missing or cannot be parsed."""
    unknown: list[str] = field(default_factory=list)
    """The names of flags that do not exist; ``problems`` has a message for each."""
    warnings: list[str] = field(default_factory=list)
    extra_arguments: list[str] = field(default_factory=list)
    """Arguments for flags that ``extra_args_provider`` of a user's model has added, to be parsed by argparse."""


def group(arguments: Sequence[str], place: str = "") -> list[Given]:
    """Group command-line arguments: each flag with the arguments that follow it up to the next flag."""
    groups: list[Given] = []
    values: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=") if is_flag(argument) else (argument, "", "")
        if is_flag(argument) or not groups:
            values = [value] if equals else []
            groups.append(Given(name, values, place))
        else:
            values.append(argument)
    return groups


def is_flag(argument: str) -> bool:
    """Whether a command-line argument is a flag, not a value such as a negative number, also one with a unit."""
    if not argument.startswith("-") or argument == "-" or argument[1] in ".0123456789":
        return False
    try:
        float(argument)
        return False
    except ValueError:
        return True


def read_layer(given: Iterable[Given], parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> Layer:
    """Read the flags of one source, for the program that trains ``architecture``."""
    reader = _Reader(parser, architecture)
    for flag in given:
        reader.read(flag)
    reader.layer.values = _merge_repetitions(_without_effect(reader.occurrences), reader.layer)
    return reader.layer


_Occurrence = tuple[str, str, Provided]
"""Field, flag and value."""


class _Reader:
    """Parses flags one by one, and collects values and messages."""

    def __init__(self, parser: argparse.ArgumentParser, architecture: ArchitectureSpec):
        self.parser = parser
        self.known = {
            name.replace("_", "-"): (name, action) for action in parser._actions for name in action.option_strings
        }
        self.others = flags_of_other_models(architecture)
        self.layer = Layer()
        self.occurrences: list[_Occurrence] = []

    def read(self, given: Given) -> None:
        """Add the value of a flag, or a message, to the layer."""
        name, at, values, problems = given.name.replace("_", "-"), given.at, given.arguments, self.layer.problems
        if not is_flag(name):
            problems.extend(f"{at}{unexpected(argument)}" for argument in (given.name, *values))
        elif name in self.known:
            self._read_known(*self.known[name], given)
        elif name in self.others:
            problems.append(f"{at}{name}: {self.others[name]}")
        elif (outcome := outcome_of(name.removeprefix("--"), values)) is not None and given.value is False:
            pass  # off, as if it were not given
        elif outcome is None:
            known = [known for known, _ in self.known.values()]
            name = _OF_OTHER_LIBRARIES.get(name, name)
            guess = did_you_mean(name, known, otherwise="see --help", cutoff=_NEAR)
            problems.append(f"{at}unknown flag {given.name}: {guess}")
            self.layer.unknown.append(given.name)
        elif outcome.kind == "replaced":
            for replacement in group(outcome.text.split(), given.place):
                self.read(replacement)
        elif outcome.kind == "ignored":
            self.layer.warnings.append(f"{at}{' '.join([name, *values])} has no effect: {outcome.text}")
        elif outcome.kind == "refused":
            problems.append(f"{at}{name}: {outcome.text}")

    def _read_known(self, name: str, action: argparse.Action, given: Given) -> None:
        at, value = given.at, given.value
        if name in ("--help", "-h", f"--{SETTINGS_FILE}") and given.place:
            self.layer.problems.append(f"{at}{name} is for the command line: remove it")
        elif isinstance(action, argparse._HelpAction):
            self.parser.print_help()
            self.parser.exit()
        elif isinstance(value, bool) and action.nargs != 0:
            self.layer.problems.append(f"{at}{name} needs a value, not {str(value).lower()}")
        elif isinstance(value, str) and action.nargs == 0:
            self.layer.problems.append(f"{at}{name} is a switch: write true or false")
        elif not isinstance(action, ConfigFlag):
            self._add_extra_arguments(name, action, given)
        elif value is False:
            if opposite := _opposite_flag(action):
                self.read(Given(opposite, [], given.place))
        else:
            self._read_value(name, action, given)

    def _add_extra_arguments(self, name: str, action: argparse.Action, given: Given) -> None:
        """Add a flag that is not a config field. ``--flag=--x`` keeps a value that looks like a flag."""
        values = given.arguments
        if action.nargs == 0:
            self.layer.problems += [f"{given.at}{unexpected(value, name)}" for value in values]
        if given.value is not False:
            joined = [f"{name}={values[0]}", *values[1:]] if values and is_flag(values[0]) else [name, *values]
            self.layer.extra_arguments += joined

    def _read_value(self, name: str, action: argparse.Action, given: Given) -> None:
        at, values, is_switch = given.at, given.arguments, action.nargs == 0
        most = 0 if is_switch else 1 if action.nargs is None else len(values)
        if given.place and len(values) > most == 1:
            self.layer.problems.append(f"{at}{name} takes one value, not a list")
        else:
            self.layer.problems += [f"{at}{unexpected(value, name if is_switch else None)}" for value in values[most:]]
        if not is_switch and not values:
            self.layer.unreadable.append(f"{at}{name}: needs a value")
            return
        text = " ".join(values[:most])
        source = Source(name if is_switch else f"{name} {text or repr(text)}", given.place)
        field = flag_fields().get(action.dest)
        try:
            value = action.const if is_switch else read_value(field, values[0] if action.nargs is None else values)
        except ValueError as error:
            self.layer.unreadable.append(f"{source}: {error}")
        else:
            self.occurrences.append((action.dest, name, Provided(value, source)))


def unexpected(argument: str, switch: str | None = None) -> str:
    """The message for an argument that belongs to no flag, or follows a boolean flag ``switch``."""
    reason = f"{switch} takes no value" if switch else "every value follows its flag"
    return f"unexpected argument {argument!r}: {reason}"


def _opposite_flag(action: argparse.Action) -> str | None:
    """The flag that undoes a boolean flag; None for a flag that sets another value, which is off unless given."""
    switch = flag_fields()[action.dest]
    if action.const is False:
        return flag_name(switch)
    return negative_flag(switch) if action.const is True else None


def flags_of_other_models(architecture: ArchitectureSpec) -> dict[str, str]:
    """Flags that only other programs have, to the message with which the program of ``architecture`` refuses them."""
    others = [field for field in flag_fields().values() if not has_flag(field, architecture.kinds)]
    return {
        name: f"{architecture.program} has no such flag: it is {_owner(field)}"
        for field in others
        for name in names_of(field)
    }


def _owner(field: Field) -> str:
    """The model and the program that have the flag of ``field``, for messages."""
    models = flag_of(field).models
    if models == "gpt bert t5":
        return "for pretraining"
    owner = next(spec for spec in (GPT2, BERT, T5, LLAVA) if models.split()[0] == spec.kinds[-1])
    return f"{owner.name}'s, for {owner.program}"


def _without_effect(occurrences: list[_Occurrence]) -> list[_Occurrence]:
    """Drop what scripts give to no effect.

    It is a pipeline size of 1 next to --no-pipeline-parallel, in those of Megatron-DeepSpeed, and
    --no-position-embedding next to RoPE, in those of Megatron-LM.
    """
    settings = {(name, value.value) for name, _, value in occurrences}
    no_effect = set[tuple[str, object]]()
    if any(flag == "--no-pipeline-parallel" for _, flag, _ in occurrences):
        no_effect.add(("pipe_parallel_size", 1))
    if settings & {("position_embedding_type", "rope"), ("position_embedding_type", "yarn")}:
        no_effect.add(("position_embedding_type", "none"))
    return [given for given in occurrences if (given[0], given[2].value) not in no_effect]


def _merge_repetitions(occurrences: list[_Occurrence], layer: Layer) -> dict[str, Provided]:
    """One value for each field; ``layer`` gets a warning for each value that a repetition of the flag overrides.

    The last value wins, so that flags appended to a script override the script; aliases must not contradict each
    other.
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
