"""Parses a command line into a ``RunConfig``: reads flags and config files, merges them, and checks the result."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.cli.batch_sizes import MICRO
from megatron.cli.deepspeed_json import compile_config, read_settings
from megatron.cli.deepspeed_json.conflicts import conflicts
from megatron.cli.deepspeed_json.file import read_config_file
from megatron.cli.flags import read_extra_args, read_flags
from megatron.cli.parser import CONFIG_FILE
from megatron.cli.provided import Provided
from megatron.cli.resolve import resolve_run
from megatron.cli.validation import accelerate_conflicts, oversized, value_problems, violations, warnings
from megatron.common.errors import ConfigError
from megatron.config import RunConfig, flag_fields
from megatron.config.fields import flag_name
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec


class ParsedRun(NamedTuple):
    """A run as configured by a command line, and everything that is wrong with it."""

    run: RunConfig
    """The config, without ``ds_config`` if there are problems."""
    problems: list[str]
    warnings: list[str]
    """Messages about provided settings that have no effect; the run starts anyway."""

    def checked(self) -> RunConfig:
        """The run. Raises ConfigError with one line for each problem."""
        if self.problems:
            raise ConfigError(self.problems)
        return self.run


def parse_run(argv: Sequence[str], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2) -> RunConfig:
    """Parse ``argv`` with the environment ``environ`` into a run. Does not import torch.

    The flags are those of the program that trains ``architecture``. Fields that depend on the tokenizer
    (``vocab_size``, ``padded_vocab_size``, ``eod_token``) keep their defaults.

    Raises ConfigError with one line for each problem. If a value or the file cannot be read, the rules are not checked.
    """
    return read_run(argv, environ, architecture).checked()


def read_run(argv: Sequence[str], environ: Mapping[str, str], architecture: ArchitectureSpec = GPT2) -> ParsedRun:
    """Like ``parse_run``, but returns the problems. Raises ConfigError if a value or the file cannot be read."""
    flags, problems, ignored = read_flags(argv, architecture)
    settings = {name: provided.value for name, provided in flags.items()}
    tree: dict[str, Any] = {}
    config_file = flags.pop(CONFIG_FILE).value if CONFIG_FILE in flags else None
    if config_file is not None:
        try:
            tree, file_problems = read_config_file(config_file)
        except ConfigError as error:
            raise ConfigError([*problems, *error.messages]) from None
        problems += file_problems
    provided, contradictions, overridden = _merge(flags, read_settings(tree, str(config_file)))
    ignored += overridden
    problems += contradictions + value_problems(provided, architecture)
    if oversized(provided):
        raise ConfigError(problems)
    run, unresolved = resolve_run(provided, environ, architecture)
    problems += [*unresolved, *(message for _, message in violations(run)), *conflicts(run, tree, provided)]
    problems += accelerate_conflicts(run, environ, config_file)
    if not problems:
        ds_config, extra_args = compile_config(run, provided, tree), read_extra_args(argv, architecture)
        run = replace(run, ds_config=ds_config, extra_args=extra_args, settings=_settings(settings, extra_args))
    return ParsedRun(run, problems, ignored + warnings(run, provided))


def _settings(values: Mapping[str, Any], extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that a settings file needs to repeat the run, name to value, without the launcher's --local_rank."""
    names = {name: flag_name(field).removeprefix("--") for name, field in flag_fields().items()}
    given = {names.get(name, name): value for name, value in values.items() if name != "local_rank"}
    return {**given, **{name: value for name, value in extra_args.items() if value not in (None, False)}}


def _merge(
    flags: Mapping[str, Provided], file: Mapping[str, Provided]
) -> tuple[dict[str, Provided], list[str], list[str]]:
    """Merge both sources into values, messages about contradictions, and warnings about flags that the file overrides.

    The file overrides bucket sizes and --zero-stage 0: scripts of DeepSpeed's 3D example give both, and the flags had
    no effect there. It also stands for a micro-batch that both give, whose other sizes are then those of the file.
    """
    differing = [name for name in flags if name in file and flags[name].value != file[name].value]
    overridden = [name for name in differing if "_bucket_" in name or (name, flags[name].value) == ("zero_stage", 0)]
    warned = [f"{flags[name].source} has no effect: {file[name].source} overrides it" for name in overridden]
    contradicted = [name for name in differing if name not in overridden]
    contradictions = [
        f"{flags[name].source} and {file[name].source} contradict each other: delete {file[name].arguments[0]} from "
        "the file to use the flag, or delete the flag"
        for name in contradicted
    ]
    stands = {*overridden, MICRO} & file.keys() - {*contradicted}
    return {**file, **flags, **{name: file[name] for name in stands}}, contradictions, warned
