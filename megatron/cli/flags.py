"""From the sources of a run's flags to a value for each field of the config.

The sources are layers, of which a later one replaces what an earlier one gives: the defaults of a provided model, the
model of ``--model-preset`` or ``--load-hf``, the settings file of ``--config``, the command line.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.cli.classic_flags import outcome_of
from megatron.cli.deepspeed_json.settings import SETTINGS
from megatron.cli.layer import (
    NEAR,
    Layer,
    Setting,
    flags_of_other_models,
    is_flag,
    known_name,
    read_layer,
)
from megatron.cli.parser import SETTINGS_FILE, build_parser, negative_flag
from megatron.common.errors import ConfigError, did_you_mean
from megatron.common.reading import unreadable_words
from megatron.config import flag_fields
from megatron.config.fields import Provided, flag_name
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY
from megatron.config.presets import PRESETS, preset_words
from megatron.model.architectures import GPT2
from megatron.model.huggingface import model_words, read_config, shape_of
from megatron.model.spec import ArchitectureSpec

PRESET, HF_FOLDER = "model_preset", "load_hf"
_ALTERNATIVES = (
    ("fp16", "bf16"),
    *((name, other) for name, field in flag_fields().items() for other in field.metadata["flag"]["instead_of"]),
)
"""Fields of which a layer that gives one replaces all in the layers before it."""


class Flags(NamedTuple):
    """The values of a command line, and of the layers below it."""

    values: dict[str, Provided]
    """By field."""
    problems: list[str]
    """A message for each flag that is unknown or refused, or contradicts another."""
    warnings: list[str]
    """A message for each flag that has no effect."""


def read_flags(argv: Sequence[str], architecture: ArchitectureSpec = GPT2) -> Flags:
    """The values in ``argv`` and the layers below it, with a message for each that is unknown, refused or ignored.

    The flags are those of the program that trains ``architecture``. ``--help`` prints the help and exits.

    Raises:
        ConfigError: a value is missing or cannot be parsed, or the settings file cannot be read; it contains the
            other messages too.
    """
    layers = _read_layers(argv, architecture)
    problems = [problem for layer in layers for problem in layer.problems]
    if unreadable := [message for layer in layers for message in layer.unreadable]:
        raise ConfigError([*problems, *unreadable])
    values = layered(layer.values for layer in layers)
    if architecture.defaults:  # what they switch on stays off where the values are given again, by a tool
        off = {name: given for layer in layers for name, given in layer.values.items() if given.value is False}
        values |= {name: off[name] for name in off.keys() & layers[0].values.keys() - values.keys()}
    return Flags(values, problems, [warning for layer in layers for warning in layer.warnings])


def layered(layers: Iterable[Mapping[str, Provided]]) -> dict[str, Provided]:
    """The values of all ``layers``, first to last: a later value replaces an earlier one, and those it excludes.

    A switch that ends up off, as by default, counts as not provided, unless a DeepSpeed config could switch it on.
    """
    merged: dict[str, Provided] = {}
    for layer in layers:
        for row in _ALTERNATIVES:
            if any(name in layer and layer[name].value is not False for name in row):
                merged = {name: provided for name, provided in merged.items() if name not in row}
        merged |= layer
    in_json = {setting.field for setting in SETTINGS}
    return {
        name: provided
        for name, provided in merged.items()
        if provided.value is not False
        or name not in flag_fields()
        or flag_fields()[name].default is not False
        or name in in_json
    }


def read_extra_args(argv: Sequence[str], architecture: ArchitectureSpec) -> dict[str, Any]:
    """The values of the flags that the program of a provided model has added. Call ``read_flags`` before.

    Raises ConfigError if a required one is missing, or a value is no JSON, since checkpoints contain them.
    """
    if architecture.provider is None:
        return {}
    words = [word for layer in _read_layers(argv, architecture) for word in layer.words]
    namespace, _ = build_parser(architecture).parse_known_args(words, argparse.Namespace(occurrences=[]))
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


def _read_layers(argv: Sequence[str], architecture: ArchitectureSpec) -> list[Layer]:
    """The layers, first to last. Raises ConfigError if the settings file cannot be read."""
    if unreadable := unreadable_words(argv):
        raise ConfigError(unreadable)
    parser = build_parser(architecture)
    for action in parser._actions:
        action.required = False  # each layer is parsed alone; see read_extra_args
    typed = read_layer([(argv, "")], parser, architecture)
    layers = []
    if architecture.provider is not None:
        layers.append(_read_settings(_defaults(architecture), parser, architecture))
    elif architecture.defaults:
        layers.append(read_layer([(architecture.defaults, f"{architecture.name}'s default")], parser, architecture))
    has_file = SETTINGS_FILE in typed.values
    if (file := typed.values.pop(SETTINGS_FILE, None)) is not None:
        # Imported here: PyYAML would take a tenth of the time to an error message.
        from megatron.cli.settings_file import read_settings_file

        try:
            layers.append(_read_settings(read_settings_file(file.value), parser, architecture))
        except ConfigError as error:
            raise ConfigError([*typed.problems, *error.messages, *typed.unreadable]) from None
    presets = [layer.values[PRESET].value for layer in (*layers, typed) if PRESET in layer.values]
    if presets:
        layers.insert(len(layers) - has_file, _read_preset(presets[-1], parser, architecture))
    folders = [layer.values[HF_FOLDER].value for layer in (*layers, typed) if HF_FOLDER in layer.values]
    if folders:
        given = [*layers[len(layers) - has_file :], typed]
        layers.insert(len(layers) - has_file, _read_huggingface(folders[-1], given, parser, architecture))
    return [*layers, typed]


def _read_preset(name: str, parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> Layer:
    place = f"--model-preset {name}"
    if PRESETS[name].program != architecture.program:
        return Layer(problems=[f"{place} is a model of {PRESETS[name].program}, and this is {architecture.program}"])
    return read_layer([(preset_words(name), place)], parser, architecture)


def _read_huggingface(
    folder: str, given: Iterable[Layer], parser: argparse.ArgumentParser, architecture: ArchitectureSpec
) -> Layer:
    """The layer of the config.json in ``folder``, which the layers ``given`` must not contradict.

    Raises CheckpointError if the file is missing, or describes no model of ours, and ConfigError if another program
    trains its model.
    """
    config = read_config(Path(folder))
    place = f"--load-hf {folder}"
    if architecture.provider is None and config.architecture != architecture.name:
        raise ConfigError(f"{place} is a {config.architecture} model, and this is {architecture.program}")
    layer = read_layer([(model_words(config), place)], parser, architecture)
    for name, value in shape_of(config).items():
        layer.problems += [
            f"{one.values[name].source} contradicts {place}, whose model has {flag_name(flag_fields()[name])} {value}: "
            "remove it"
            for one in given
            if name in one.values and not _is_same(config, name, one.values[name].value, value)
        ]
    return layer


def _is_same(config: ModelConfig, name: str, given: Any, value: Any) -> bool:
    """Whether the model with one value of a flag has the weights of the other: YaRN extends a model with rotation."""
    if name == "moe_layer_freq":
        return replace(config, moe_layer_freq=given).expert_layers == config.expert_layers
    return given == value or {given, value} == set(ROTARY)


def _defaults(architecture: ArchitectureSpec) -> list[Setting]:
    """The default flags of a provided model."""
    assert architecture.provider is not None
    settings = []
    for name, value in architecture.provider.defaults.items():
        texts = [str(item) for item in value] if isinstance(value, list | tuple) else str(value)
        if value is not None:
            settings.append(Setting(name, value if isinstance(value, bool) else texts, "args_defaults"))
    return settings


def _read_settings(
    settings: Iterable[Setting], parser: argparse.ArgumentParser, architecture: ArchitectureSpec
) -> Layer:
    """The layer of a settings file, or of defaults."""
    actions = {name: action for action in parser._actions for name in action.option_strings}
    sources, problems = [], []
    for setting in settings:
        try:
            sources.append((_words_of(setting, actions, architecture), setting.place))
        except ValueError as error:
            problems.append(f"{setting.place}: {error}")
    layer = read_layer(sources, parser, architecture)
    layer.problems[:0] = problems
    return layer


def _words_of(setting: Setting, actions: Mapping[str, argparse.Action], architecture: ArchitectureSpec) -> list[str]:
    """``setting`` on a command line. Raises ValueError if there is no such flag, or it takes another kind of value."""
    name, value = known_name(f"--{setting.name}", actions), setting.value
    action = actions.get(name)
    if action is None and name not in flags_of_other_models(architecture):
        if (
            outcome_of(
                name.removeprefix("--"), [] if isinstance(value, bool) else [value] if isinstance(value, str) else value
            )
            is None
        ):
            guess = did_you_mean(name, actions, otherwise="see --help", cutoff=NEAR)
            raise ValueError(f"there is no flag {name}: {guess}")
    if name in ("--help", f"--{SETTINGS_FILE}"):
        raise ValueError(f"{name} is for the command line: remove it")
    if isinstance(value, bool):
        if action is not None and action.nargs != 0:
            raise ValueError(f"{name} needs a value, not {str(value).lower()}")
        return [name] if value else _off(name, action)
    if action is not None and action.nargs == 0:
        raise ValueError(f"{name} is a switch: write true or false")
    if isinstance(value, str):
        return [f"{name}={value}"]
    if action is not None and action.nargs is None:
        raise ValueError(f"{name} takes one value, not a list")
    if flags := [item for item in value if is_flag(item)]:
        raise ValueError(f"{name}: {flags[0]!r} looks like a flag; write a value")
    return [name, *value]


def _off(name: str, action: argparse.Action | None) -> list[str]:
    """The words that switch off the switch ``name``; none if it is off without them."""
    if action is None or action.dest not in flag_fields():
        return []
    of_action = flag_fields()[action.dest]
    if action.const is False:
        return [flag_name(of_action)]
    return [negative_flag(of_action)] if action.const is True else []
