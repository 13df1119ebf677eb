"""Reshards a checkpoint without training: on CPUs, ranks of the new layout load it and save it.

Each rank loads like a run that resumes on the new layout, from the universal checkpoint next to the checkpoint.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import yaml

from megatron.checkpoint.compatibility import at_saved_sample, check_compatible
from megatron.checkpoint.run_file import SavedRun
from megatron.cli import read_run
from megatron.common.errors import CheckpointError, ConfigError
from megatron.config import DataConfig, RunConfig, sections
from megatron.config.fields import flag_name
from megatron.config.model import padded_vocabulary
from megatron.launch.environment import prepare_environment
from megatron.model.spec import architecture_of

_REPLACED = ("parallel", "checkpoint", "logging", "observe")
"""Sections of the configuration that are not taken from the saved run."""
_BATCH_FLAGS = ("batch-size", "gas", "compile")
"""Flags that depend on the layout or the device, but do not change the weights."""


def resharded_run(saved: SavedRun, flags: Sequence[str], replica: int, copies: int, output: Path) -> RunConfig:
    """The run of ``saved`` on the layout that ``flags`` set, with ``copies`` replicas of ``replica`` ranks.

    Raises ConfigError for flags that the program or its rules reject, CheckpointError if the run cannot be resharded.
    """
    if saved.is_converted:
        raise CheckpointError(
            f"{saved.path} holds weights only, as tools/convert_checkpoint.py writes them, and needs no resharding: "
            f"give --load {saved.folder} --finetune to a run on any layout"
        )
    architecture = architecture_of(saved.full_model_config())
    if not architecture.is_language_model or not saved.config.get("settings"):
        raise CheckpointError(
            f"{saved.path} does not have the flags of a run of this suite: use --load on the new layout"
        )
    new = {flag_name(field)[2:] for name in _REPLACED for field in fields(sections()[name]) if "flag" in field.metadata}
    settings = {name: value for name, value in saved.config["settings"].items() if name not in {*new, *_BATCH_FLAGS}}
    size, micro = (saved.config["train"][name] for name in ("global_batch_size", "micro_batch_size"))
    if size % copies:
        raise ConfigError(
            f"--data-parallel-size {copies} does not divide the global batch of {size} samples: give a divisor"
        )
    flags = [*flags, "--batch-size", str(math.gcd(micro, size // copies)), "--save", str(output)]
    flags += ["--load", str(saved.folder), *([] if saved.has_optimizer else ["--no-load-optim", "--no-save-optim"])]
    flags += [] if saved.has_rng else ["--no-load-rng"]
    flags += [] if "step-batch-size-schedule" in settings else ["--global-batch-size", str(size)]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "WORLD_SIZE": str(replica * copies)}
    with NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(settings, file)
        file.flush()
        run = read_run(["--config", file.name, *flags], environ, architecture).checked()
    before, data = saved.full_model_config(), saved.config["data"]
    vocabulary = padded_vocabulary(
        before.vocab_size, run.parallel.model_parallel_size, run.model.make_vocab_size_divisible_by
    )
    derived = {
        field.name: data[field.name] for field in fields(DataConfig) if not field.metadata and field.name in data
    }
    known = {name: getattr(before, name) for name in ("vocab_size", "eod_token", "decoder_start_token")}
    model = replace(run.model, **known, padded_vocab_size=vocabulary)
    run = replace(run, settings={name: value for name, value in run.settings.items() if name != "load"})
    run = at_saved_sample(saved, replace(run, model=model, data=replace(run.data, **derived)))
    check_compatible(saved, run)
    return run


def reshard(saved: SavedRun, run: RunConfig) -> None:
    """Load ``saved`` on the layout of ``run`` and save it there. Every rank must call it."""
    prepare_environment(os.environ, run.parallel)

    from megatron.checkpoint.collective_errors import on_all_ranks
    from megatron.checkpoint.collective_lock import lock_folder
    from megatron.checkpoint.load import check_share, load_checkpoint
    from megatron.checkpoint.manifest import read_manifest
    from megatron.checkpoint.save import Checkpointer
    from megatron.cli.settings_file import settings_text
    from megatron.engines import deepspeed_silenced
    from megatron.engines.build import build_engine
    from megatron.training.learning_rates import annealing_lr
    from megatron.training.setup import initialized_ranks

    with initialized_ranks(run, ()) as (layout, _), lock_folder(run) as lock:
        on_all_ranks(lambda: check_share(saved, read_manifest(saved.path)))
        with deepspeed_silenced(run.logging.verbose):
            engine = build_engine(run, layout, annealing_lr(run))
            settings = settings_text(run)
            checkpointer = Checkpointer(engine, run, lambda _: None, saved, lock, settings=settings)
            loaded = load_checkpoint(engine, run, layout, saved)
        checkpointer.prepare()
        checkpointer.save(loaded.iteration, saved.skipped_samples)
        checkpointer.finish()
