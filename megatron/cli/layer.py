"""One source of flags, such as a command line or a settings file: from what it gives to a value for each field.

Names are accepted with hyphens or underscores. Flags that only Megatron-LM knows are replaced, ignored or refused.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, field
from typing import Any, NamedTuple

from megatron.cli.classic_flags import outcome_of
from megatron.cli.parser import SETTINGS_FILE, ConfigFlag, names_of
from megatron.cli.provided import Provided, Source, read_value
from megatron.common.errors import did_you_mean
from megatron.config import flag_fields
from megatron.config.fields import flag_name, flag_of, has_flag, negative_flag
from megatron.model.architectures import BERT, GPT2, LLAVA, T5
from megatron.model.spec import ArchitectureSpec

_NEAR = 0.8
"""Similarity from which on a known flag is suggested for an unknown one."""
_OF_OTHER_LIBRARIES = {
    "--learning-rate": "--lr",
    "--max-steps": "--train-iters",
    "--output-dir": "--save",
    "--per-device-train-batch-size": "--batch-size",
    "--gradient-accumulation-steps": "--gas",
    "--warmup-steps": "--lr-warmup-iters",
    "--max-grad-norm": "--clip-grad",
}
"""Names of other libraries for flags of ours, in whose values units may differ: they are suggested, not replaced."""


class Given(NamedTuple):
    """A flag as a source gives it."""

    name: str
    """With its dashes; without them it is a word that follows no flag."""
    value: bool | str | list[str]
    """The words that follow a flag of a command line; in a settings file, whether it is on, a text or a list."""
    place: str = ""
    """The source, for messages; empty for the command line."""

    @property
    def at(self) -> str:
        """The beginning of a message about it."""
        return f"{self.place}: " if self.place else ""

    @property
    def words(self) -> list[str]:
        """Its value as words of a command line."""
        return [] if isinstance(self.value, bool) else [self.value] if isinstance(self.value, str) else self.value


@dataclass
class Layer:
    """What one source gives."""

    values: dict[str, Provided] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """A message for each value that is missing or cannot be parsed."""
    warnings: list[str] = field(default_factory=list)
    extra_words: list[str] = field(default_factory=list)
    """The flags that the program of a provided model has added, for its parser."""


def group(words: Sequence[str], place: str = "") -> list[Given]:
    """Each flag of a command line, with the words that follow it up to the next flag."""
    groups: list[Given] = []
    values: list[str] = []
    for word in words:
        name, equals, value = word.partition("=") if is_flag(word) else (word, "", "")
        if is_flag(word) or not groups:
            values = [value] if equals else []
            groups.append(Given(name, values, place))
        else:
            values.append(word)
    return groups


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag: not a negative number."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
        return False
    except ValueError:
        return True


def read_layer(given: Iterable[Given], parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> Layer:
    """The layer of all that a source gives to the program that trains ``architecture``."""
    reader = _Reader(parser, architecture)
    for one in given:
        reader.read(one)
    reader.layer.values = _merge_repetitions(_without_single_stage(reader.occurrences), reader.layer)
    return reader.layer


_Occurrence = tuple[str, str, Provided]
"""Field, flag and value."""


class _Reader:
    """Reads one flag after the other."""

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
        name, at, values, problems = given.name.replace("_", "-"), given.at, given.words, self.layer.problems
        if not is_flag(name):
            problems.extend(f"{at}{unexpected(word)}" for word in (given.name, *values))
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
            self._add_extra_words(name, action, given)
        elif value is False:
            if off := _off(action):
                self.read(Given(off, [], given.place))
        else:
            self._read_value(name, action, given)

    def _add_extra_words(self, name: str, action: argparse.Action, given: Given) -> None:
        """Add a flag that is no field of the config, for the program's parser, which gets a value such as --x, too."""
        words = given.words
        if action.nargs == 0:
            self.layer.problems += [f"{given.at}{unexpected(word, name)}" for word in words]
        if given.value is not False:
            self.layer.extra_words += (
                [f"{name}={words[0]}", *words[1:]] if words and is_flag(words[0]) else [name, *words]
            )

    def _read_value(self, name: str, action: argparse.Action, given: Given) -> None:
        at, words, is_switch = given.at, given.words, action.nargs == 0
        most = 0 if is_switch else 1 if action.nargs is None else len(words)
        self.layer.problems += [f"{at}{unexpected(word, name if is_switch else None)}" for word in words[most:]]
        if not is_switch and not words:
            self.layer.unreadable.append(f"{at}{name}: needs a value")
            return
        text = " ".join(words[:most])
        source = Source(name if is_switch else f"{name} {text or repr(text)}", given.place)
        value: Any = action.const
        try:
            if not is_switch:
                value = read_value(flag_fields().get(action.dest), words[0] if action.nargs is None else words)
        except ValueError as error:
            self.layer.unreadable.append(f"{source}: {error}")
        else:
            self.occurrences.append((action.dest, name, Provided(value, source)))


def unexpected(word: str, switch: str | None = None) -> str:
    """The message for a word of a command line that belongs to no flag, maybe behind a ``switch``."""
    return f"unexpected argument {word!r}: {f'{switch} takes no value' if switch else 'every value follows its flag'}"


def _off(action: argparse.Action) -> str | None:
    """The flag that a switch is off with; None if it is off without one."""
    switch = flag_fields()[action.dest]
    if action.const is False:
        return flag_name(switch)
    return negative_flag(switch) if action.const is True else None


def flags_of_other_models(architecture: ArchitectureSpec) -> dict[str, str]:
    """The flags that the program of ``architecture`` refuses since other models have them, with the message."""
    others = [field for field in flag_fields().values() if not has_flag(field, architecture.kinds)]
    return {
        name: f"{architecture.program} has no such flag: it is {_owner(field)}"
        for field in others
        for name in names_of(field)
    }


def _owner(field: Field) -> str:
    """The model and the program that have the flag of ``field``, which not all have."""
    models = flag_of(field).models
    if models == "gpt bert t5":
        return "for pretraining"
    owner = next(spec for spec in (GPT2, BERT, T5, LLAVA) if models.split()[0] == spec.kinds[-1])
    return f"{owner.name}'s, for {owner.program}"


def _without_single_stage(occurrences: list[_Occurrence]) -> list[_Occurrence]:
    """Without a pipeline size of 1 next to --no-pipeline-parallel: the scripts of Megatron-DeepSpeed give both."""
    if all(flag != "--no-pipeline-parallel" for _, flag, _ in occurrences):
        return occurrences
    return [given for given in occurrences if (given[0], given[2].value) != ("pipe_parallel_size", 1)]


def _merge_repetitions(occurrences: list[_Occurrence], layer: Layer) -> dict[str, Provided]:
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
