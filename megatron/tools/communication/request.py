"""Which runs are extracted: the command lines of the starts of a program. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.cli import read_run
from megatron.cli.flags import read_flags
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.tools.command_line import read_architecture
from megatron.tools.verify.request import LAYOUT_FIELDS

ITERATIONS = 3
"""Of each start: in the first buffers are made and shapes exchanged, in the second lines are logged."""
_REPLACED = (
    "save", "load", "auto_resume", "async_save", "save_interval", "exit_interval", "exit_duration_in_mins",
    "snapshot_interval", "snapshot_dir", "eval_interval", "log_interval", "num_workers", "metrics_file", "trace",
    "run_dir", "tensorboard_dir", "profile_dir", "local_rank", "load_hf", "no_load_optim", "no_load_rng", "finetune",
    "data_cache_path",
)  # fmt: skip
_OF_LAYOUT = (
    *LAYOUT_FIELDS, "tp_comm_overlap", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size",
    "pipeline_partition", "repartition_from",
)  # fmt: skip
"""What a run on one rank has otherwise."""
_SAVED = "{folder}/checkpoint"


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    name: str
    words: tuple[str, ...]
    world_size: int
    loads: str | None = None
    """The start that has saved what it loads."""
    ends_by_signal: bool = False
    nothing_counts: bool = False
    """Whether numbers that depend on the data are extreme; the communication must be the first start's."""


def make_starts(
    argv: Sequence[str], world_size: int, environ: Mapping[str, str], program: Path
) -> tuple[RunConfig, list[Start]]:
    """The run that ``argv`` configures for ``program``, and its starts: fresh, with empty batches, and resumed.

    The last two are one rank with the batch of all, which saves, and the run that loads it.

    Raises ConfigError with a line for each thing that is wrong.
    """
    architecture = read_architecture(program)
    values, problems, _ = read_flags(argv, architecture)
    if problems:
        raise ConfigError(problems)
    words = [word for name, value in values.items() if name not in _REPLACED for word in value.arguments]
    common = [] if {"train_iters", "train_samples"} & values.keys() else ["--train-iters", str(4 * ITERATIONS)]
    common += [] if "eval_iters" in values else ["--eval-iters", "1"]
    common += ["--num-workers", "0", "--log-interval", "2", "--eval-interval", "2", "--save", _SAVED]
    saving = [*common, "--save-interval", "2", "--exit-interval", str(ITERATIONS)]
    fresh = Start("fresh start", (*words, *saving), world_size)
    empty = replace(fresh, name="empty batches", nothing_counts=True)
    memory = ["--snapshot-interval", "1", "--snapshot-dir", "{folder}"]
    again = (*words, *common, "--auto-resume", "--async-save", "--save-interval", "1", *memory)
    resumed = Start("resumed", again, world_size, loads=fresh.name, ends_by_signal=True)
    run = _checked(fresh, environ, architecture)
    _checked(resumed, environ, architecture)
    kept = [word for name, value in values.items() if name not in (*_REPLACED, *_OF_LAYOUT) for word in value.arguments]
    kept += ["--zero-stage", str(run.zero.zero_stage), "--batch-size", str(run.train.global_batch_size)]
    one = Start("one rank", (*kept, *saving), 1)
    loading = (*words, *common, "--auto-resume", "--exit-interval", "1")
    relaid = Start("from one rank", loading, world_size, loads=one.name)
    return run, [fresh, empty, resumed, one, relaid]


def _checked(start: Start, environ: Mapping[str, str], architecture: object) -> RunConfig:
    environ = {**environ, "WORLD_SIZE": str(start.world_size)}
    return read_run(start.words, environ, architecture).checked()  # type: ignore[arg-type]


def representatives(run: RunConfig) -> list[int]:
    """For each rank the one that is run for it: of the same stage, the first in all groups or the last.

    The first stands for the tensor-parallel ranks beside it, whose parts of ZeRO's are as large, or for itself.
    """
    parallel = run.parallel
    sizes = parallel.data_parallel_size, parallel.sequence_ranks, parallel.model_parallel_size
    of_stage = sizes[0] * sizes[1] * sizes[2]
    found = []
    for rank in range(parallel.world_size):
        stage, within = divmod(rank, of_stage)
        if parallel.world_size <= EVERY_RANK:
            chosen = within
        else:
            chosen = 0 if within == 0 or within < sizes[2] < of_stage else of_stage - 1
        found.append(stage * of_stage + chosen)
    return found


EVERY_RANK = 4
"""Runs of up to that many ranks are run rank by rank."""
