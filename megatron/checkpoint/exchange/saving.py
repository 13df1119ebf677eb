"""A model that comes from elsewhere, as a checkpoint of this suite to start from."""

from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.checkpoint.checkpointing import CHECKPOINT_VERSION
from megatron.checkpoint.exchange.outline import WORDS
from megatron.checkpoint.exchange.tensor_files import check_room
from megatron.checkpoint.exchange.whole import WholeModel
from megatron.checkpoint.tracker import describe, publish, write_description
from megatron.config import (
    ActivationConfig,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
    ZeroConfig,
)

TAG = "global_step0"


def write_checkpoint(folder: Path, model: WholeModel, *, vocab_file: Path | None, merge_file: Path | None) -> None:
    """Write the weights in fp32, as the plain engine of one process would, at iteration 0 and without optimizer.

    The two files are those that a run with this checkpoint will find its tokenizer in.
    Raises ResourceError where the disk has no room.
    """
    model = replace(model, weights={name: tensor.float() for name, tensor in model.weights.items()})
    check_room(folder, model.weights)
    run = _run(model, vocab_file, merge_file)
    description = describe(run, 0)
    (folder / TAG).mkdir()
    state = {
        "module": _padded(model, run.model.padded_vocab_size),
        "optimizer": None,
        "lr_scheduler": None,
        "iteration": 0,
        "global_steps": 0,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "checkpoint_version": CHECKPOINT_VERSION,
        "args": description["config"],
        "ds_version": deepspeed.__version__,
    }
    torch.save(state, folder / TAG / "mp_rank_00_model_states.pt")
    write_description(folder / TAG, description)
    publish(folder, TAG, 0)


def _run(model: WholeModel, vocab_file: Path | None, merge_file: Path | None) -> RunConfig:
    """The run that would have saved it."""
    config = model.config
    rows = -(-config.vocab_size // config.make_vocab_size_divisible_by) * config.make_vocab_size_divisible_by
    return RunConfig(
        model=replace(config, padded_vocab_size=rows),
        parallel=ParallelConfig(),
        precision=PrecisionConfig(),
        zero=ZeroConfig(),
        activation=ActivationConfig(),
        optim=OptimConfig(),
        train=TrainConfig(),
        data=DataConfig(
            seq_length=config.max_position_embeddings,
            vocab_file=vocab_file and str(vocab_file),
            merge_file=merge_file and str(merge_file),
        ),
        checkpoint=CheckpointConfig(no_save_optim=True, no_save_rng=True),
        logging=LoggingConfig(),
        observe=ObserveConfig(),
        ds_config={},
    )


def _padded(model: WholeModel, rows: int) -> dict[str, Tensor]:
    words = model.weights[WORDS]
    return {**model.weights, WORDS: F.pad(words, (0, 0, 0, rows - words.size(0)))}
