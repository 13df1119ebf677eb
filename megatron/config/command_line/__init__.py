"""From a command line to a run: reads the flags and the JSON, brings them together, and checks all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.config.command_line.parser import CONFIG_FILE, read_flags
from megatron.config.command_line.resolve import resolve_run
from megatron.config.deepspeed_json import compile_config, read_knobs
from megatron.config.deepspeed_json.file import ConfigFile, read_config_file
from megatron.config.deepspeed_json.sections import optimizer_problems, pipeline_problems, profile_problems
from megatron.config.errors import ConfigError
from megatron.config.fields import Provided
from megatron.config.validation import value_problems, violations
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec


class ParsedRun(NamedTuple):
    """A run as configured by a command line, and everything that is wrong with it."""

    run: RunConfig
    """Without its DeepSpeed config if there are problems."""
    problems: list[str]

    def checked(self) -> RunConfig:
        """The run. Raises ConfigError with one line for each problem."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.run


def parse_run(argv: Sequence[str], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2) -> RunConfig:
    """The run that ``argv`` asks for, in the world that ``environ`` describes. Imports no torch.

    The flags are those of the program that trains ``architecture``. What the tokenizer decides (``vocab_size``,
    ``padded_vocab_size``, ``eod_token``) is left open.

    Raises:
        ConfigError: with a line for each thing that is wrong. Where a value or the file cannot be
            read at all, the lines stop there, for the rules have nothing to judge.
    """
    return read_run(argv, environ, architecture).checked()


def read_run(argv: Sequence[str], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2) -> ParsedRun:
    """The same, with what is wrong beside it. Raises ConfigError where a value or the file cannot be read at all."""
    flags, problems = read_flags(argv, architecture)
    file = ConfigFile("", {})
    if CONFIG_FILE in flags:
        try:
            file, faults = read_config_file(flags.pop(CONFIG_FILE).value)
        except ConfigError as error:
            raise ConfigError([*problems, *error.messages]) from None
        problems += faults
    given, contradictions = _merge(flags, read_knobs(file))
    run, unsettled = resolve_run(given, environ, architecture)
    problems += contradictions + value_problems(given) + unsettled
    problems += violations(run) + optimizer_problems(run, file.tree, given)
    problems += pipeline_problems(run, file.tree) + profile_problems(run.observe, file.tree)
    return ParsedRun(run if problems else replace(run, ds_config=compile_config(run, given, file.tree)), problems)


def _merge(flags: Mapping[str, Provided], file: Mapping[str, Provided]) -> tuple[dict[str, Provided], list[str]]:
    """The values of both sources, and a message for each field on which they differ."""
    contradictions = [
        f"{flags[name].source} and {file[name].source} contradict each other: remove one"
        for name in flags
        if name in file and flags[name].value != file[name].value
    ]
    return {**file, **flags}, contradictions
