"""From a command line to a run: reads the flags and the JSON file, merges them, and checks the result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.config.command_line.parser import CONFIG_FILE, read_flags
from megatron.config.command_line.resolve import resolve_run
from megatron.config.deepspeed_json import compile_config, conflicts
from megatron.config.deepspeed_json.file import ConfigFile, read_config_file
from megatron.config.deepspeed_json.settings import read_settings
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
    """The run that ``argv`` configures in the environment ``environ``. Does not import torch.

    The flags are those of the program that trains ``architecture``. Fields that depend on the tokenizer
    (``vocab_size``, ``padded_vocab_size``, ``eod_token``) keep their defaults.

    Raises:
        ConfigError: with one line for each problem. If a value or the file cannot be read, the rules
            are not checked.
    """
    return read_run(argv, environ, architecture).checked()


def read_run(argv: Sequence[str], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2) -> ParsedRun:
    """Like ``parse_run``, with the problems in the result. Raises ConfigError if a value or the file cannot be read."""
    flags, problems = read_flags(argv, architecture)
    file = ConfigFile("", {})
    if CONFIG_FILE in flags:
        try:
            file, file_problems = read_config_file(flags.pop(CONFIG_FILE).value)
        except ConfigError as error:
            raise ConfigError([*problems, *error.messages]) from None
        problems += file_problems
    provided, contradictions = _merge(flags, read_settings(file))
    run, unresolved = resolve_run(provided, environ, architecture)
    problems += contradictions + value_problems(provided) + unresolved
    problems += violations(run) + conflicts(run, file.tree, provided)
    if not problems:
        run = replace(run, ds_config=compile_config(run, provided, file.tree))
    return ParsedRun(run, problems)


def _merge(flags: Mapping[str, Provided], file: Mapping[str, Provided]) -> tuple[dict[str, Provided], list[str]]:
    """The values of both sources, and a message for each field on which they differ."""
    contradictions = [
        f"{flags[name].source} and {file[name].source} contradict each other: remove one"
        for name in flags
        if name in file and flags[name].value != file[name].value
    ]
    return {**file, **flags}, contradictions
