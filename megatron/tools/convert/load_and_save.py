"""The model that a path holds, of whatever kind it is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.checkpoint.load import CHECKPOINT_VERSION
from megatron.checkpoint.parameter_state import whole_weights
from megatron.checkpoint.saved_run import describe
from megatron.checkpoint.tensor_files import read_file
from megatron.checkpoint.tracker import publish, write_description
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
from megatron.config.errors import CheckpointError
from megatron.model.architectures import architecture_of
from megatron.tools.convert.huggingface import read_huggingface
from megatron.tools.convert.inspection import RUN_KEY, read_config, read_description
from megatron.tools.convert.kinds import Found
from megatron.tools.convert.tensor_files import check_room, read_tensors
from megatron.tools.convert.whole import WholeModel, check_sizes, in_order


def read_model(found: Found) -> WholeModel:
    """All of its weights in one piece. Raises CheckpointError where it is not whole."""
    return _READERS[found.kind](found)


def read_weights(found: Found) -> Mapping[str, Tensor]:
    """All weights by name, also where nothing says what model they are of. Raises as ``read_model`` does."""
    if found.kind == "universal" and found.saved is None:
        return _universal_weights(found.path)
    return read_model(found).weights


def read_versions(found: Found) -> dict[str, Any] | None:
    """Which DeepSpeed wrote it, and Megatron's number for what the names and rows mean."""
    if found.kind not in ("tag", "folder"):
        return None
    file = next((found.saved.path).glob("*mp_rank_00_model_states.pt"), None)
    if file is None:
        raise CheckpointError(f"{found.saved.path} has no mp_rank_00_model_states.pt; it is not whole")
    state = read_file(file)
    return {"DeepSpeed": state.get("ds_version"), "checkpoint": state.get("checkpoint_version")}


def run_metadata(model: WholeModel) -> dict[str, str]:
    """What the header of merged weights says, for ``read_model`` to know the model by."""
    return {RUN_KEY: json.dumps(model.description)}


def _of_suite(found: Found) -> WholeModel:
    saved = found.saved
    config = saved.whole_model_config()
    weights = {name: copies[0] for name, copies in whole_weights(config, saved)}
    return WholeModel(config, weights, saved.description)


def _of_universal(found: Found) -> WholeModel:
    if found.saved is None:
        raise CheckpointError(f"{found.path} does not say what model it is, nor does a tag beside it: name that tag")
    config = found.saved.whole_model_config()
    weights = _universal_weights(found.path)
    for name, spec in architecture_of(config).named_parameters(config).items():
        if spec.is_vocabulary and name in weights:
            weights[name] = weights[name][: config.vocab_size]  # the rest is padding
    return WholeModel(config, in_order(weights, config, str(found.path)), found.saved.description)


def _universal_weights(path: Path) -> dict[str, Tensor]:
    """``zero/NAME/fp32.pt`` for each weight, in the order of the layers as far as their names tell."""
    files = {file.parent.name: file for file in (path / "zero").glob("*/fp32.pt")}
    number = {name: int(layer) if (layer := name.split(".")[0]).isdecimal() else -1 for name in files}
    return {name: _fp32(files[name]) for name in sorted(files, key=lambda name: (number[name], name))}


def _fp32(file: Path) -> Tensor:
    value = read_file(file)
    return value["param"] if isinstance(value, Mapping) else value


def _of_safetensors(found: Found) -> WholeModel:
    config, weights = read_config(found), read_tensors(found.path)
    check_sizes(config, len(weights), str(found.path))
    return WholeModel(config, in_order(weights, config, str(found.path)), read_description(found))


def _of_huggingface(found: Found) -> WholeModel:
    return read_huggingface(found.path)


_READERS: dict[str, Callable[[Found], WholeModel]] = {
    "tag": _of_suite,
    "folder": _of_suite,
    "universal": _of_universal,
    "safetensors": _of_safetensors,
    "huggingface": _of_huggingface,
}


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
    padded = dict(model.weights)
    for name, spec in architecture_of(model.config).named_parameters(model.config).items():
        if spec.is_vocabulary:
            missing = rows - padded[name].size(0)
            padded[name] = F.pad(padded[name], (0, 0) * (padded[name].dim() - 1) + (0, missing))
    return padded
