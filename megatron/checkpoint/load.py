"""Loads a checkpoint that a ``Checkpointer`` has saved."""

import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.across_ranks import check_share_of_copies
from megatron.checkpoint.checks import form_errors, value_at
from megatron.checkpoint.collective_errors import on_all_ranks, on_rank_0
from megatron.checkpoint.compatibility import has_same_ranks, loads_directly, overridden_settings
from megatron.checkpoint.manifest import Manifest, check_content, read_manifest
from megatron.checkpoint.resharding import load_resharded
from megatron.checkpoint.run_file import SavedRun
from megatron.checkpoint.schema import read_rank_files
from megatron.checkpoint.tensor_files import check_identity, read_file
from megatron.checkpoint.tracker import resolve
from megatron.common.checkpoint_folders import existing_rank_file
from megatron.common.errors import CheckpointError
from megatron.config import RunConfig
from megatron.engines.state import optimizer_name
from megatron.model.architectures import architecture_of
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed


def select_checkpoint(run: RunConfig) -> SavedRun | None:
    """The newest undamaged checkpoint, the same on every rank; None for a fresh start.

    Every rank must call it. Each rank verifies its share of the files; no tensor is read. Raises CheckpointError on all
    ranks if there is no undamaged checkpoint, or if the newest is damaged and ``--load-strict`` is given.
    """
    broken: dict[str, str] = {}

    def resolved() -> tuple[SavedRun, Manifest] | None:
        saved = resolve(run, broken)
        return None if saved is None else (saved, read_manifest(saved.path))  # read once, for all ranks

    while (candidate := on_rank_0(resolved)) is not None:
        try:
            on_all_ranks(partial(check_share, *candidate))
            return candidate[0]
        except CheckpointError as error:
            broken[candidate[0].tag] = error.in_one_line
    return None


def check_share(saved: SavedRun, manifest: Manifest) -> None:
    """Raise CheckpointError if a file of this rank's share is damaged; files are distributed in the order of size."""
    names = sorted(manifest, key=lambda name: (-manifest[name].size, name))
    for name in names[dist.get_rank() :: dist.get_world_size()]:
        check_content(saved.path / name, manifest[name])
        if name.endswith(".pt"):
            check_identity(saved.path / name, read_file(saved.path / name), saved.iteration)


def rng_file(tag_folder: Path, rank: int) -> Path:
    """The file with the random number states of global rank ``rank``."""
    return existing_rank_file(tag_folder / f"rng_state_{rank:05d}.pt")


def random_states() -> dict[str, Any]:
    """All random number states of this process, by Megatron's names."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, gauss),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": get_accelerator().get_rng_state(),
        "rng_tracker_states": get_rng_tracker().get_states(),
    }


def restore_random_states(place: Path, states: Any) -> None:
    """Restore the result of ``random_states()``, read from ``place``. Raises CheckpointError for other content."""
    restored = {
        "random_rng_state": random.setstate,
        "np_rng_state": _restore_numpy,
        "rng_tracker_states": _restore_tracked,
        "cuda_rng_state": get_accelerator().set_rng_state,
        "torch_rng_state": torch.set_rng_state,
    }
    for name, restore in restored.items():
        state = value_at(place, states, name)
        try:
            restore(state)
        except (LookupError, ArithmeticError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{place}: {name} is no state of its random number generator") from error


def _restore_numpy(state: tuple) -> None:
    kind, keys, position, has_gauss, gauss = state
    if not 0 <= position <= len(keys):  # NumPy would read beyond the end
        raise ValueError
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


def _restore_tracked(tracked: dict[str, torch.Tensor]) -> None:
    if tracked.keys() != get_rng_tracker().get_states().keys():
        raise ValueError
    for state in tracked.values():  # the tracker does not check its states
        get_accelerator().set_rng_state(state)
    get_rng_tracker().set_states({name: state.clone() for name, state in tracked.items()})  # the file may be removed


class Loaded(NamedTuple):
    """The result of loading."""

    iteration: int
    """Finished iterations."""
    remarks: tuple[str, ...] = ()
    """Lines for the user about how it was loaded."""


FRESH = Loaded(0)


def load_checkpoint(engine: DeepSpeedEngine, run: RunConfig, layout: ParallelLayout, saved: SavedRun) -> Loaded:
    """Load ``saved``, on any layout. Every rank must call it.

    A ``Checkpointer`` must have been created for the engine before, so that DeepSpeed's loading runs no code. Raises
    CheckpointError if a file is damaged.
    """
    engine.settle()
    config, groups = run.checkpoint, [dict(group) for group in engine.optimizer.param_groups]
    kept = {name: value for name, value in vars(engine.optimizer).items() if name in ("clip_grad", "loss_scaler")}
    if getattr(engine.optimizer, "dynamic_loss_scale", False):
        kept.pop("loss_scaler")
    remarks = [f"--override: {line}" for line in overridden_settings(saved, run)]
    optimizer, used = optimizer_name(engine.basic_optimizer), saved.description.get("optimizer")
    if used not in (None, optimizer) and not (config.finetune or config.no_load_optim):
        remarks.append(f"the optimizer is {optimizer}: its state is converted from that of {used}")
    if config.finetune and run.model.lora_rank > saved.full_model_config().lora_rank == 0:
        remarks.append(load_pretrained(engine, run, layout, saved))
    else:
        remarks += _load_state(engine, run, layout, saved)
    for group, current in zip(engine.optimizer.param_groups, groups, strict=True):
        # DeepSpeed has restored the saved settings; with --override those of the command line differ and are kept.
        group.update({name: value for name, value in current.items() if name not in ("params", "step")})
    vars(engine.optimizer).update(kept)
    # With ZeRO, DeepSpeed restores the optimizer's groups, with the saved learning rates, after the schedule.
    engine.lr_scheduler.apply()
    if config.finetune:
        return Loaded(0, tuple(remarks))
    if not config.no_load_rng and (reason := _restore_random_streams(run, saved)) is not None:
        model_parallel_manual_seed(run.train.seed, layout, iteration=saved.iteration)
        remarks.append(f"{reason}: random streams restart from --seed and the iteration")
    return Loaded(saved.iteration, tuple(remarks))


def _load_state(engine: DeepSpeedEngine, run: RunConfig, layout: ParallelLayout, saved: SavedRun) -> list[str]:
    """Load all state that ``run`` requires, with DeepSpeed if possible, else by resharding; returns lines about it."""
    config = run.checkpoint
    with_optimizer = not (config.finetune or config.no_load_optim)
    if not loads_directly(saved, run):
        load_resharded(engine, saved, layout.tensor_group, optimizer=with_optimizer, progress=not config.finetune)
        return [f"{saved.path}: saved on {saved.layout}; each rank reads its parts"]
    has_spec = architecture_of(run.model).provider is None
    # Each rank reads the files that it would write itself.
    contents = read_rank_files(engine, saved, optimizer=with_optimizer, progress=not config.finetune, has_spec=has_spec)
    check_share_of_copies(saved, has_spec=has_spec)
    with engine.checkpoint_engine.holding(contents), form_errors(saved.path):
        engine.load_checkpoint(
            str(saved.folder),
            tag=saved.tag,
            load_module_only=config.finetune,
            load_optimizer_states=with_optimizer,
            load_lr_scheduler_states=not config.finetune,
        )
    return []


def _restore_random_streams(run: RunConfig, saved: SavedRun) -> str | None:
    """Continue the random streams of ``saved``, or return why they cannot continue."""
    if not has_same_ranks(saved, run):
        return "the ranks differ"
    states = read_file(file := rng_file(saved.path, dist.get_rank()))
    with form_errors(file):
        own, state = get_accelerator().get_rng_state(), value_at(file, states, "cuda_rng_state")
        if isinstance(state, torch.Tensor) and state.shape != own.shape:
            return "saved on another kind of device"
        restore_random_states(file, states)
    return None


def load_pretrained(engine: DeepSpeedEngine, run: RunConfig, layout: ParallelLayout, saved: SavedRun) -> str:
    """Load the weights that ``saved`` and the model of ``run`` share. Others, such as a new head, keep their values.

    Every rank must call it. Returns a line for the user. Raises the same errors as ``load_checkpoint``.
    """
    config = saved.full_model_config()
    pretrained = architecture_of(config).named_parameters(config)
    load_resharded(engine, saved, layout.tensor_group, optimizer=False, progress=False, only=pretrained)
    new = architecture_of(run.model).named_parameters(run.model).keys() - pretrained.keys()
    names = ", ".join(sorted(new)) if len(new) <= _NAMED else f"{len(new)} parameters"
    return f"{saved.path}: not in it, and so initialized: {names or 'nothing'}"


_NAMED = 8
"""Maximum number of new parameters that are listed by name."""
