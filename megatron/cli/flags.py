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

from megatron.cli.deepspeed_json import SETTINGS
from megatron.cli.layer import Given, Layer, group, read_layer, unexpected
from megatron.cli.parser import SETTINGS_FILE, build_parser
from megatron.cli.presets import PRESETS, preset_words
from megatron.cli.provided import Provided
from megatron.common.errors import ConfigError
from megatron.common.reading import unreadable_words
from megatron.config import flag_fields
from megatron.config.fields import flag_name, flag_of
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY
from megatron.model.architectures import GPT2
from megatron.model.huggingface import model_title, model_words, read_config, shape_of
from megatron.model.spec import ArchitectureSpec

PRESET, HF_FOLDER = "model_preset", "load_hf"
_ALTERNATIVES = (
    ("fp16", "bf16"),
    *((name, other) for name, field in flag_fields().items() for other in flag_of(field).instead_of),
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
    fields = flag_fields()
    return {
        name: provided
        for name, provided in merged.items()
        if provided.value is not False or name not in fields or fields[name].default is not False or name in in_json
    }


def read_extra_args(argv: Sequence[str], architecture: ArchitectureSpec) -> dict[str, Any]:
    """The values of the flags that the program of a provided model has added. Call ``read_flags`` before.

    Raises ConfigError if a required one is missing, if a word follows no flag, or if a value is no JSON, since
    checkpoints contain them.
    """
    if architecture.provider is None:
        return {}
    words = [word for layer in _read_layers(argv, architecture) for word in layer.extra_words]
    namespace, rest = build_parser(architecture).parse_known_args(words)
    if rest:
        raise ConfigError([unexpected(word) for word in rest])
    values = {name: value for name, value in vars(namespace).items() if name != "deepspeed"}
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
    typed = read_layer(group(argv), parser, architecture)
    below = read_layer(_defaults(architecture), parser, architecture)
    from_file = Layer()
    if (file := typed.values.pop(SETTINGS_FILE, None)) is not None:
        # Imported here: PyYAML would take a tenth of the time to an error message.
        from megatron.cli.settings_file import read_settings_file

        try:
            from_file = read_layer(read_settings_file(file.value), parser, architecture)
        except ConfigError as error:
            raise ConfigError([*typed.problems, *error.messages, *typed.unreadable]) from None
    model = Layer()
    given = layered([below.values, from_file.values, typed.values])
    if PRESET in given:
        model = _read_preset(given[PRESET].value, parser, architecture)
    if HF_FOLDER in given:
        model = _read_huggingface(given[HF_FOLDER].value, [from_file, typed], parser, architecture)
    return [below, model, from_file, typed]


def _defaults(architecture: ArchitectureSpec) -> list[Given]:
    """The default flags of an architecture, or of a provided model."""
    if architecture.provider is None:
        return group(architecture.defaults, f"{architecture.name}'s default")
    given = []
    for name, value in architecture.provider.defaults.items():
        if value is not None:
            texts = [str(item) for item in value] if isinstance(value, list | tuple) else str(value)
            given.append(Given(f"--{name}", value if isinstance(value, bool) else texts, "args_defaults"))
    return given


def _read_preset(name: str, parser: argparse.ArgumentParser, architecture: ArchitectureSpec) -> Layer:
    place = f"--model-preset {name}"
    if PRESETS[name].program != architecture.program:
        return Layer(problems=[f"{place} is a model of {PRESETS[name].program}, and this is {architecture.program}"])
    return read_layer(group(preset_words(name), place), parser, architecture)


def _read_huggingface(
    folder: str, given: Iterable[Layer], parser: argparse.ArgumentParser, architecture: ArchitectureSpec
) -> Layer:
    """The layer of the config.json in ``folder``, which the layers ``given`` must not contradict.

    Raises CheckpointError if the file is missing, or describes no model of ours, and ConfigError if another program
    trains its model.
    """
    place = f"--load-hf {folder}"
    if (Path(folder) / "latest").exists() and not (Path(folder) / "config.json").exists():
        raise ConfigError(f"{place} holds checkpoints of training, and is no Hugging Face folder: give it to --load")
    if not Path(folder).is_dir():
        raise ConfigError(f"{place}: no such folder; name one on this host: nothing is downloaded")
    config = read_config(Path(folder))
    if architecture.provider is None and config.architecture != architecture.name:
        raise ConfigError(f"{place} is a {model_title(config)} model, and this is {architecture.program}")
    layer = read_layer(group(model_words(config), place), parser, architecture)
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
