"""Load a run that a ``Checkpointer`` saved."""

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpoint.files import read_checked_file
from megatron.checkpoint.rng import restore_random_states, rng_file
from megatron.checkpoint.tracker import SavedRun
from megatron.checkpoint.zero3 import zero3_file, zero3_weights
from megatron.config import RunConfig

CHECKPOINT_VERSION = 3.0
"""Megatron's number for weights whose query-key-value rows are [heads, 3, head size]."""


def load_checkpoint(engine: DeepSpeedEngine, run: RunConfig, saved: SavedRun) -> int:
    """Take up ``saved``; the iteration that was finished when it was written, or 0 with ``--finetune``.

    The engine is one that a ``Checkpointer`` was made for, so that DeepSpeed reads its files without running code.
    """
    config = run.checkpoint
    if run.zero.zero_stage == 3 and (config.finetune or config.no_load_optim):
        _load_zero3_weights(engine, saved, go_on=not config.finetune)
    else:
        engine.load_checkpoint(
            str(saved.folder),
            tag=saved.tag,
            load_module_only=config.finetune,
            load_optimizer_states=not (config.finetune or config.no_load_optim),
            load_lr_scheduler_states=not config.finetune,
        )
    # With ZeRO, DeepSpeed restores the optimizer's groups behind the schedule, and the saved rates with them.
    engine.lr_scheduler.apply()
    if config.finetune:
        return 0
    if not config.no_load_rng:
        restore_random_states(read_checked_file(rng_file(saved.folder / saved.tag, dist.get_rank())))
    return saved.iteration


def _load_zero3_weights(engine: DeepSpeedEngine, saved: SavedRun, *, go_on: bool) -> None:
    """Weights without optimizer state, for which DeepSpeed would read whatever ``latest`` names, by pickle."""
    place, layout = saved.folder / saved.tag, saved.description["layout"]
    tensor_rank = engine.mpu.get_model_parallel_rank()
    data_size = layout["data-parallel size"] * layout["--ds-sequence-parallel-size"]
    weights = zero3_weights(place, tensor_rank=tensor_rank, data_size=data_size)
    engine.optimizer.checkpoint_event_prologue()
    engine.load_module_state_dict({"module": weights}, fetch_z3_params=True)
    engine.optimizer.refresh_fp32_params()
    engine.optimizer.checkpoint_event_epilogue()
    if go_on:
        state = read_checked_file(zero3_file(place, 0, tensor_rank, "model"))
        engine.lr_scheduler.load_state_dict(state["lr_scheduler"])
        engine.global_steps, engine.global_samples = state["global_steps"], state["global_samples"]
        engine.skipped_steps = state["skipped_steps"]
