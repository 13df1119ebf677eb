"""From a command line to a run: reads the flags and the JSON, brings them together, and checks all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.config.architecture import GPT2, Architecture
from megatron.config.command_line.parser import CONFIG_FILE, read_flags
from megatron.config.command_line.resolve import resolve_run
from megatron.config.deepspeed_json import compile_config, read_knobs
from megatron.config.deepspeed_json.file import ConfigFile, read_config_file
from megatron.config.deepspeed_json.sections import optimizer_problems, pipeline_problems, profile_problems
from megatron.config.errors import ConfigError
from megatron.config.provided import merge
from megatron.config.validation import violations
from megatron.config.validation.values import value_problems


class Reading(NamedTuple):
    """What a command line asks for, and what speaks against it."""

    run: RunConfig
    """Without its DeepSpeed config where something does."""
    problems: list[str]


def parse_run(argv: Sequence[str], environ: Mapping[str, str], architecture: Architecture = GPT2) -> RunConfig:
    """The run that ``argv`` asks for, in the world that ``environ`` describes. Imports no torch.

    The flags are those of the program that trains ``architecture``. What the tokenizer decides (``vocab_size``,
    ``padded_vocab_size``, ``eod_token``) is left open.

    Raises:
        ConfigError: with a line for each thing that is wrong. Where a value or the file cannot be
            read at all, the lines stop there, for the rules have nothing to judge.
    """
    return settled(read_run(argv, environ, architecture))


def settled(reading: Reading) -> RunConfig:
    """Its run. Raises ConfigError with a line for each thing that speaks against it."""
    if reading.problems:
        raise ConfigError(reading.problems)
    return reading.run


def read_run(argv: Sequence[str], environ: Mapping[str, str], architecture: Architecture = GPT2) -> Reading:
    """The same, with what is wrong beside it. Raises ConfigError where a value or the file cannot be read at all."""
    flags, problems = read_flags(argv, architecture)
    file = ConfigFile("", {})
    if CONFIG_FILE in flags:
        try:
            file, faults = read_config_file(flags.pop(CONFIG_FILE).value)
        except ConfigError as error:
            raise ConfigError([*problems, *error.messages]) from None
        problems += faults
    given, contradictions = merge(flags, read_knobs(file))
    run, unsettled = resolve_run(given, environ, architecture)
    problems += contradictions + value_problems(given) + unsettled
    problems += violations(run) + optimizer_problems(run, file.tree, given)
    problems += pipeline_problems(run, file.tree) + profile_problems(run.observe, file.tree)
    return Reading(run if problems else replace(run, ds_config=compile_config(run, given, file.tree)), problems)
