"""The runs to record, as command lines: fresh, with empty batches, resumed, resharded. No torch here."""

import math
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
"""Iterations of each run: the first allocates buffers and exchanges shapes, the second logs a line."""
_REPLACED = (
    "save", "load", "auto_resume", "async_save", "save_interval", "exit_interval", "exit_duration_in_mins",
    "snapshot_interval", "snapshot_dir", "eval_interval", "log_interval", "num_workers", "metrics_file", "trace",
    "run_dir", "tensorboard_dir", "profile_dir", "local_rank", "load_hf", "no_load_optim", "no_load_rng", "finetune",
    "data_cache_path", "no_save_optim", "load_strict", "skip_train", "rewind_on_spike", "spike_factor", "trace_steps",
    "profile_steps", "flops_profile_step", "wandb_project", "wandb_exp_name", "mlflow_experiment",
)  # fmt: skip
_LAYOUT_FLAGS = (
    *LAYOUT_FIELDS, "tp_comm_overlap", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size",
    "pipeline_partition", "repartition_from",
)  # fmt: skip
"""Settings that differ in a run on one rank."""
_SAVED = "{folder}/checkpoint"


@dataclass(frozen=True)
class Start:
    """One start of the program."""

    name: str
    arguments: tuple[str, ...]
    world_size: int
    loads: str | None = None
    """Name of the start that saved the checkpoint to load."""
    ends_by_signal: bool = False
    nothing_counts: bool = False
    """Whether all tokens are masked (see ``memoryless``); the communication must be the same as in the first start."""


def make_starts(
    argv: Sequence[str], world_size: int, environ: Mapping[str, str], program: Path
) -> tuple[RunConfig, list[Start]]:
    """The run that ``argv`` configures for ``program``, and its starts.

    The starts are: fresh, with empty batches, resumed, a run on one rank with the same global batch, which saves a
    checkpoint, and a run that loads this checkpoint.

    Raises ConfigError with a line for each problem.
    """
    architecture = read_architecture(program)
    values, problems, _ = read_flags(argv, architecture)
    if problems:
        raise ConfigError(problems)
    given = [argument for name, value in values.items() if name not in _REPLACED for argument in value.arguments]
    common = [] if {"train_iters", "train_samples"} & values.keys() else ["--train-iters", str(4 * ITERATIONS)]
    common += [] if "eval_iters" in values else ["--eval-iters", "1"]
    common += ["--num-workers", "0", "--log-interval", "2", "--eval-interval", "2", "--save", _SAVED]
    saving = [*common, "--save-interval", "2", "--exit-interval", str(ITERATIONS)]
    fresh = Start("fresh start", (*given, *saving), world_size)
    empty = replace(fresh, name="empty batches", nothing_counts=True)
    memory = ["--snapshot-interval", "1", "--snapshot-dir", "{folder}"]
    resuming = (*given, *common, "--auto-resume", "--async-save", "--save-interval", "1", *memory)
    resumed = Start("resumed", resuming, world_size, loads=fresh.name, ends_by_signal=True)
    run = _read_run(fresh, environ, architecture)
    for flag in ("offload_optimizer", "offload_param"):
        if (place := getattr(run.zero, flag)) != "none":
            raise ConfigError(f"--{flag.replace('_', '-')} {place} is not supported here: remove it")
    _read_run(resumed, environ, architecture)
    excluded = (*_REPLACED, *_LAYOUT_FLAGS)
    kept = [argument for name, value in values.items() if name not in excluded for argument in value.arguments]
    batch = math.gcd(*(size for _, size in run.train.batches.steps))
    kept += ["--zero-stage", str(run.zero.zero_stage), "--batch-size", str(batch)]
    if "step_batch_size_schedule" not in values:
        kept += ["--global-batch-size", str(run.train.global_batch_size)]
    single = Start("one rank", (*kept, *saving), 1)
    loading = (*given, *common, "--auto-resume", "--exit-interval", "1")
    resharded = Start("from one rank", loading, world_size, loads=single.name)
    return run, [fresh, empty, resumed, single, resharded]


def _read_run(start: Start, environ: Mapping[str, str], architecture: object) -> RunConfig:
    environ = {**environ, "WORLD_SIZE": str(start.world_size)}
    return read_run(start.arguments, environ, architecture).checked()  # type: ignore[arg-type]


def representatives(run: RunConfig) -> list[int]:
    """For each rank its representative, which is run in its place: the first or the last rank of the same stage.

    The first rank represents itself and the other ranks of its tensor-parallel group, whose ZeRO partitions have the
    same size; the last rank represents all others.
    """
    parallel = run.parallel
    sizes = parallel.data_parallel_size, parallel.sequence_ranks, parallel.model_parallel_size
    stage_ranks = sizes[0] * sizes[1] * sizes[2]
    chosen = []
    for rank in range(parallel.world_size):
        stage, within = divmod(rank, stage_ranks)
        if parallel.world_size <= EVERY_RANK:
            representative = within
        else:
            representative = 0 if within == 0 or within < sizes[2] < stage_ranks else stage_ranks - 1
        chosen.append(stage * stage_ranks + representative)
    return chosen


EVERY_RANK = 4
"""Maximum number of ranks of a run whose ranks are all run."""
