"""Save and load a run in DeepSpeed's layout of files, with Megatron's tracker beside it."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.rng import random_states, restore_random_states
from megatron.checkpoint.tracker import SavedRun, describe, publish, write_description
from megatron.config import RunConfig

CHECKPOINT_VERSION = 3.0
"""Megatron's number for weights whose query-key-value rows are [heads, 3, head size]."""


def save_checkpoint(engine: DeepSpeedEngine, run: RunConfig, iteration: int, left_out: Sequence[range] = ()) -> Path:
    """Write the tag of ``iteration`` under ``--save`` and point the trackers to it. Every rank must call it."""
    folder, tag = Path(run.checkpoint.save), f"global_step{iteration}"
    description = describe(run, iteration, left_out)
    client_state = {
        "iteration": iteration,
        "consumed_samples": description["consumed_samples"],
        "tokens": description["consumed_tokens"],
        "checkpoint_version": CHECKPOINT_VERSION,
        "args": description["config"],
    }
    saves_shards = engine.save_zero_checkpoint
    if run.checkpoint.no_save_optim:
        client_state["optimizer"] = None  # takes the place of DeepSpeed's own entry
        engine.save_zero_checkpoint = False
    engine.save_checkpoint(str(folder), tag=tag, client_state=client_state, save_latest=False)
    engine.save_zero_checkpoint = saves_shards
    if not run.checkpoint.no_save_rng:
        torch.save(random_states(), _rng_path(folder / tag))
    dist.barrier()
    if dist.get_rank() == 0:
        write_description(folder / tag, description)
        publish(folder, tag, iteration)
    dist.barrier()
    return folder / tag


def load_checkpoint(engine: DeepSpeedEngine, run: RunConfig, saved: SavedRun) -> int:
    """Take up ``saved``; the iteration that was finished when it was written, or 0 with ``--finetune``."""
    config = run.checkpoint
    weights_only = config.finetune
    engine.load_checkpoint(
        str(saved.folder),
        tag=saved.tag,
        load_module_only=weights_only,
        load_optimizer_states=not (weights_only or config.no_load_optim),
        load_lr_scheduler_states=not weights_only,
    )
    # With ZeRO, DeepSpeed restores the optimizer's groups behind the schedule, and the saved rates with them.
    engine.lr_scheduler.apply()
    if weights_only:
        return 0
    if not config.no_load_rng:
        restore_random_states(torch.load(_rng_path(saved.folder / saved.tag), weights_only=True))
    return saved.iteration


def _rng_path(tag_folder: Path) -> Path:
    return tag_folder / f"rng_state_{dist.get_rank():05d}.pt"
