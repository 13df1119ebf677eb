"""Load a run that a ``Checkpointer`` saved."""

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.collective_errors import on_first, together
from megatron.checkpoint.compatibility import changes, has_same_ranks, loads_directly, short_layout
from megatron.checkpoint.manifest import check_content, read_manifest
from megatron.checkpoint.reshard import load_progress, load_weights_and_optimizer
from megatron.checkpoint.tensor_files import check_harmless, read_checked_file
from megatron.checkpoint.tracker import SavedRun, resolve
from megatron.checkpoint.universal import cached
from megatron.config import RunConfig
from megatron.config.errors import CheckpointError
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed


def choose_checkpoint(run: RunConfig) -> SavedRun | None:
    """The newest checkpoint whose files are what was saved, the same on every rank; None for a fresh start.

    No tensor is read. Every rank must call it. Raises CheckpointError, on all ranks alike, where there is no
    such checkpoint, or where the first is broken and ``--load-strict`` was given.
    """
    broken: dict[str, str] = {}
    while (saved := on_first(lambda: resolve(run, broken))) is not None:
        problem = next((text for text in together(lambda: _problem(saved)) if text), None)
        if problem is None:
            break
        broken[saved.tag] = problem
    return saved


def _problem(saved: SavedRun) -> str | None:
    """What is wrong with this rank's share of the files: every n-th, the largest first."""
    place = saved.folder / saved.tag
    try:
        manifest = read_manifest(place)
        names = sorted(manifest, key=lambda name: (-manifest[name].size, name))
        for name in names[dist.get_rank() :: dist.get_world_size()]:
            check_content(place / name, manifest[name])
            if name.endswith(".pt"):
                check_harmless(place / name)
    except CheckpointError as error:
        return str(error)
    return None


def rng_file(tag_folder: Path, rank: int) -> Path:
    """Where the streams of global rank ``rank`` lie."""
    return tag_folder / f"rng_state_{rank:05d}.pt"


def random_states() -> dict[str, Any]:
    """Every stream of this process, under the classic names."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": get_accelerator().get_rng_state(),
        "rng_tracker_states": get_rng_tracker().get_states(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Take every stream up where ``random_states()`` left it."""
    random.setstate(states["random_rng_state"])
    kind, keys, position, has_gauss, gauss = states["np_rng_state"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    get_accelerator().set_rng_state(states["cuda_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    get_rng_tracker().set_states(states["rng_tracker_states"])


CHECKPOINT_VERSION = 3.0
"""Megatron's number for weights whose query-key-value rows are [heads, 3, head size]."""


class Loaded(NamedTuple):
    """Where a run begins."""

    iteration: int
    """Finished iterations."""
    remarks: tuple[str, ...] = ()
    """What the user should know about the way there."""


FRESH = Loaded(0)


def load_checkpoint(engine: DeepSpeedEngine, run: RunConfig, layout: ParallelLayout, saved: SavedRun) -> Loaded:
    """Take up ``saved``, whatever layout it was saved on. Every rank must call it.

    The engine is one that a ``Checkpointer`` was made for, so that DeepSpeed reads its files without running code.
    Raises CheckpointError where it is not whole, and ResourceError where it has to be converted and there is no room.
    """
    groups = [dict(group) for group in engine.optimizer.param_groups]
    place = saved.folder / saved.tag
    remarks = [f"--override: {line}" for line in changes(saved.description, place, run)]
    if loads_directly(saved.description, run):
        _load_own_files(engine, run, saved)
    else:
        remarks.append(_load_converted(engine, run, layout, saved))
    _keep_hyperparameters(engine, groups)
    # With ZeRO, DeepSpeed restores the optimizer's groups behind the schedule, and the saved rates with them.
    engine.lr_scheduler.apply()
    if run.checkpoint.finetune:
        return Loaded(0, tuple(remarks))
    if not run.checkpoint.no_load_rng:
        remarks += _load_random_states(run, layout, saved)
    return Loaded(saved.iteration, tuple(remarks))


def _load_own_files(engine: DeepSpeedEngine, run: RunConfig, saved: SavedRun) -> None:
    """Each rank finds its state in the files it would write itself."""
    config = run.checkpoint
    engine.load_checkpoint(
        str(saved.folder),
        tag=saved.tag,
        load_module_only=config.finetune,
        load_optimizer_states=not (config.finetune or config.no_load_optim),
        load_lr_scheduler_states=not config.finetune,
    )


def _load_converted(engine: DeepSpeedEngine, run: RunConfig, layout: ParallelLayout, saved: SavedRun) -> str:
    """By way of a form without a layout; a word about it."""
    config = run.checkpoint
    folder, is_new = on_first(lambda: cached(saved))
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    together(lambda: cached(saved) if is_first_here else None)  # it is there, unless hosts have disks of their own
    with_optimizer = not (config.finetune or config.no_load_optim)
    load_weights_and_optimizer(engine, folder, layout.tensor_group, optimizer=with_optimizer)
    if not config.finetune:
        load_progress(engine, folder)
    source = short_layout(saved.description)
    if is_new:
        return f"{saved.folder / saved.tag}: converted from {source}, cached in {folder}"
    return f"{saved.folder / saved.tag}: saved on {source}, read from {folder}"


def _load_random_states(run: RunConfig, layout: ParallelLayout, saved: SavedRun) -> list[str]:
    """Each rank's own where the ranks are the same; else new ones, and a word about them."""
    if has_same_ranks(saved.description, run):
        restore_random_states(read_checked_file(rng_file(saved.folder / saved.tag, dist.get_rank())))
        return []
    model_parallel_manual_seed(run.train.seed, layout, iteration=saved.iteration)
    return ["other ranks than before: random streams begin anew from --seed and the iteration"]


def _keep_hyperparameters(engine: DeepSpeedEngine, groups: list[dict[str, Any]]) -> None:
    """The command line's, where DeepSpeed restored the checkpoint's; they differ with ``--override`` only."""
    for group, given in zip(engine.optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in given.items() if name not in ("params", "step")})
