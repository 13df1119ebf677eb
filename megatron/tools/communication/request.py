"""Which runs are extracted: the command lines of three starts of a program. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.cli import read_run
from megatron.cli.flags import read_flags
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.tools.command_line import read_architecture

ITERATIONS = 3
"""Of each start: in the first buffers are made and shapes exchanged, in the second lines are logged."""
_REPLACED = (
    "save", "load", "auto_resume", "async_save", "save_interval", "exit_interval", "exit_duration_in_mins",
    "snapshot_interval", "snapshot_dir", "eval_interval", "log_interval", "num_workers", "metrics_file", "trace",
    "run_dir", "tensorboard_dir", "profile_dir", "local_rank", "load_hf", "no_load_optim", "no_load_rng", "finetune",
    "data_cache_path",
)  # fmt: skip
_SAVED = "{folder}/checkpoint"


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    name: str
    words: tuple[str, ...]
    world_size: int
    loads: bool = False
    """Whether it loads what the first start has saved."""
    ends_by_signal: bool = False
    nothing_counts: bool = False
    """Whether numbers that depend on the data are extreme; the communication must be the first start's."""


def make_starts(
    argv: Sequence[str], world_size: int, environ: Mapping[str, str], program: Path
) -> tuple[RunConfig, list[Start]]:
    """The run that ``argv`` configures for ``program``, and its starts: fresh, with empty batches, and resumed.

    Raises ConfigError with a line for each thing that is wrong.
    """
    architecture = read_architecture(program)
    values, problems, _ = read_flags(argv, architecture)
    if problems:
        raise ConfigError(problems)
    words = [word for name, value in values.items() if name not in _REPLACED for word in value.words]
    if not {"train_iters", "train_samples"} & values.keys():
        words += ["--train-iters", str(4 * ITERATIONS)]
    if "eval_iters" not in values:
        words += ["--eval-iters", "1"]
    words += ["--num-workers", "0", "--log-interval", "2", "--eval-interval", "2", "--save", _SAVED]
    fresh = Start("fresh start", (*words, "--save-interval", "2", "--exit-interval", str(ITERATIONS)), world_size)
    memory = ["--snapshot-interval", "1", "--snapshot-dir", "{folder}"]
    words += ["--auto-resume", "--async-save", "--save-interval", "1"]
    empty = replace(fresh, name="empty batches", nothing_counts=True)
    again = Start("resumed", (*words, *memory), world_size, loads=True, ends_by_signal=True)
    run = _checked(fresh, environ, architecture)
    _checked(again, environ, architecture)
    return run, [fresh, empty, again]


def _checked(start: Start, environ: Mapping[str, str], architecture: object) -> RunConfig:
    environ = {**environ, "WORLD_SIZE": str(start.world_size)}
    return read_run(start.words, environ, architecture).checked()  # type: ignore[arg-type]


def representatives(run: RunConfig) -> list[int]:
    """For each rank the one that is run for it: of the same stage, and first or last in its groups like it.

    Those of a stage: the first in all groups, the last tensor-parallel rank beside it, and the last in all groups.
    """
    parallel = run.parallel
    sizes = parallel.data_parallel_size, parallel.sequence_ranks, parallel.model_parallel_size
    of_stage = sizes[0] * sizes[1] * sizes[2]
    found = []
    for rank in range(parallel.world_size):
        stage, within = divmod(rank, of_stage)
        if parallel.world_size <= EVERY_RANK:
            chosen = within
        elif within == 0:
            chosen = 0
        else:
            chosen = sizes[2] - 1 if within < sizes[2] else of_stage - 1
        found.append(stage * of_stage + chosen)
    return found


EVERY_RANK = 8
"""Runs of up to that many ranks are run rank by rank."""
