"""Merges the sources of a run's flags into one value for each field of the config.

The sources are layers; a later layer overrides the earlier ones: defaults of the architecture or of a user's model
(``pretrain``), the model of ``--model-preset`` or ``--load-hf``, the settings file of ``--config``, the command line.
"""

import argparse
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron.cli.deepspeed_json import SETTINGS
from megatron.cli.layer import Given, Layer, group, read_layer, unexpected
from megatron.cli.parser import SETTINGS_FILE, build_parser
from megatron.cli.presets import PRESETS, preset_arguments
from megatron.cli.provided import Provided
from megatron.common.errors import ConfigError
from megatron.common.reading import unreadable_arguments
from megatron.config import flag_fields
from megatron.config.fields import flag_name, flag_of
from megatron.config.model import ModelConfig
from megatron.config.positions import ROTARY
from megatron.model.architectures import GPT2, architecture_of
from megatron.model.huggingface import model_arguments, model_title, read_config, shape_of
from megatron.model.spec import ArchitectureSpec

PRESET, HF_FOLDER = "model_preset", "load_hf"
_ALTERNATIVES = (
    ("fp16", "bf16"),
    *((name, other) for name, field in flag_fields().items() for other in flag_of(field).instead_of),
)
"""Groups of fields that exclude each other: a layer that sets one removes the values that earlier layers set."""


class Flags(NamedTuple):
    """The merged values of a command line and all other layers."""

    values: dict[str, Provided]
    """Values by field name."""
    problems: list[str]
    """A message for each flag that is unknown, refused, or contradicts another flag."""
    warnings: list[str]
    """A message for each flag that has no effect."""


def read_flags(argv: Sequence[str], architecture: ArchitectureSpec = GPT2) -> Flags:
    """Read ``argv`` and the other layers, with a message for each flag that is unknown, refused or ignored.

    Accepts the flags of the program that trains ``architecture``. ``--help`` prints the help and exits.

    Raises ConfigError, which also contains the other messages, if a value is missing or cannot be parsed, or the
    settings file cannot be read.
    """
    layers = _read_layers(argv, architecture)
    problems = [problem for layer in layers for problem in layer.problems]
    if unreadable := [message for layer in layers for message in layer.unreadable]:
        raise ConfigError([*problems, *unreadable])
    values = layered(layer.values for layer in layers)
    if architecture.defaults:  # keep an explicit "off" of a default: tools pass the values on as arguments
        off = {name: given for layer in layers for name, given in layer.values.items() if given.value is False}
        values |= {name: off[name] for name in off.keys() & layers[0].values.keys() - values.keys()}
    return Flags(values, problems, [warning for layer in layers for warning in layer.warnings])


def layered(layers: Iterable[Mapping[str, Provided]]) -> dict[str, Provided]:
    """Merge ``layers``, first to last: a later value overrides an earlier one, and removes earlier ones it excludes.

    A boolean flag that ends up off, its default, counts as not provided unless a DeepSpeed config can turn it on.
    """
    merged: dict[str, Provided] = {}
    for layer in layers:
        for names in _ALTERNATIVES:
            if any(name in layer and layer[name].value is not False for name in names):
                merged = {name: provided for name, provided in merged.items() if name not in names}
        merged |= layer
    in_json = {setting.field for setting in SETTINGS}
    fields = flag_fields()
    return {
        name: provided
        for name, provided in merged.items()
        if provided.value is not False or name not in fields or fields[name].default is not False or name in in_json
    }


def read_extra_args(argv: Sequence[str], architecture: ArchitectureSpec) -> dict[str, Any]:
    """Values of the flags added by ``extra_args_provider`` of a user's model. Call ``read_flags`` first.

    Raises ConfigError if a required flag is missing, an argument follows no flag, or a value is not JSON:
    checkpoints store the values.
    """
    if architecture.provider is None:
        return {}
    arguments = [argument for layer in _read_layers(argv, architecture) for argument in layer.extra_arguments]
    namespace, rest = build_parser(architecture).parse_known_args(arguments)
    if rest:
        raise ConfigError([unexpected(argument) for argument in rest])
    values = {name: value for name, value in vars(namespace).items() if name != "deepspeed"}
    for name, value in values.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(
                f"the value of {name}, a flag of {architecture.program}, is a {type(value).__name__}, which cannot be "
                "saved as JSON: let its type be str, int, float or bool"
            ) from None
    return values


def _read_layers(argv: Sequence[str], architecture: ArchitectureSpec) -> list[Layer]:
    """The layers, first to last. Raises ConfigError if the settings file cannot be read."""
    if unreadable := unreadable_arguments(argv):
        raise ConfigError(unreadable)
    parser = build_parser(architecture)
    command_line = read_layer(group(argv), parser, architecture)
    defaults = read_layer(_defaults(architecture), parser, architecture)
    from_file = Layer()
    if (file := command_line.values.pop(SETTINGS_FILE, None)) is not None:
        # Imported here: PyYAML would take a tenth of the time to an error message.
        from megatron.cli.settings_file import read_settings_file

        try:
            from_file = read_layer(read_settings_file(file.value), parser, architecture)
        except ConfigError as error:
            raise ConfigError([*command_line.problems, *error.messages, *command_line.unreadable]) from None
    model = Layer()
    given = layered([defaults.values, from_file.values, command_line.values])
    if PRESET in given:
        model = _read_preset(given[PRESET].value, parser, architecture)
    if HF_FOLDER in given:
        model = _read_huggingface(given[HF_FOLDER].value, [from_file, command_line], parser, architecture)
    return [defaults, model, from_file, command_line]


def _defaults(architecture: ArchitectureSpec) -> list[Given]:
    """The default flags of an architecture, or ``args_defaults`` of a user's model."""
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
        program = PRESETS[name].program
        return Layer(problems=[f"{place} is a model of {program}, and this is {architecture.program}: start {program}"])
    return read_layer(group(preset_arguments(name), place), parser, architecture)


def _read_huggingface(
    folder: str, given: Iterable[Layer], parser: argparse.ArgumentParser, architecture: ArchitectureSpec
) -> Layer:
    """The layer with the flags of the config.json in ``folder``; the layers ``given`` must not contradict it.

    Raises CheckpointError if the file is missing, or its model is not supported, and ConfigError if another program
    trains the model.
    """
    place = f"--load-hf {folder}"
    if os.path.exists(f"{folder}/latest") and not os.path.exists(f"{folder}/config.json"):
        raise ConfigError(f"{place} has training checkpoints, and is not a Hugging Face folder: use --load for it")
    if not os.path.isdir(folder):
        raise ConfigError(f"{place}: no such folder; models are not downloaded: give a local folder")
    config = read_config(Path(folder))
    if architecture.provider is None and config.architecture != architecture.name:
        raise ConfigError(
            f"{place} is a {model_title(config)} model, and this is {architecture.program}: start "
            f"{architecture_of(config).program}"
        )
    layer = read_layer(group(model_arguments(config), place), parser, architecture)
    for name, value in shape_of(config).items():
        layer.problems += [
            f"{other.values[name].source} contradicts {place}, whose model has {flag_name(flag_fields()[name])} "
            f"{value}: remove it"
            for other in given
            if name in other.values and not _is_compatible(config, name, other.values[name].value, value)
        ]
    return layer


def _is_compatible(config: ModelConfig, name: str, given: Any, value: Any) -> bool:
    """Whether the ``given`` value of a flag needs the same weights as ``value``: YaRN can extend a RoPE model."""
    if name == "moe_layer_freq":
        return replace(config, moe_layer_freq=given).expert_layers == config.expert_layers
    return given == value or {given, value} == set(ROTARY)
