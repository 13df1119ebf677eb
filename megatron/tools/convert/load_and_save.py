"""Reads models in any checkpoint format, and writes them as checkpoints or Hugging Face folders."""

import json
import mmap
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import set_default_mmap_options, skip_data

from megatron.checkpoint.across_ranks import check_copies, check_shards, check_states
from megatron.checkpoint.checks import form_errors, outline, wrong
from megatron.checkpoint.commit import publish, write_description
from megatron.checkpoint.huggingface import our_weights
from megatron.checkpoint.manifest import MANIFEST
from megatron.checkpoint.parameter_state import SavedStates
from megatron.checkpoint.run_file import SavedRun, describe
from megatron.checkpoint.saved_layout import model_file
from megatron.checkpoint.schema import CHECKPOINT_VERSION
from megatron.checkpoint.tensor_files import LazyTensors, outlines_of, read_file
from megatron.common.errors import CheckpointError, reason
from megatron.common.reading import check_archive, is_present
from megatron.common.tokenizer_files import HUGGINGFACE, PUBLISHED, SENTENCEPIECE
from megatron.config import CheckpointConfig, DataConfig, RunConfig
from megatron.model.architectures import architecture_of
from megatron.model.huggingface import HF_CONFIG, read_json
from megatron.model.huggingface import read_config as read_folder_config
from megatron.tools.command_line import progress_bar
from megatron.tools.convert.full_model import (
    FullModel,
    check_sizes,
    check_space_for,
    in_layer_order,
    read_tensors,
    without_padding,
    write_tensors,
)
from megatron.tools.convert.huggingface_files import copy_carried, keep_chat_template
from megatron.tools.convert.inspection import RUN_KEY, FoundCheckpoint, read_config, read_description, verify
from megatron.tools.convert.their_weights import their_weights
from megatron.tools.convert.vocabulary import Vocabulary
from megatron.tools.convert.written_config import write_config


def read_model(checkpoint: FoundCheckpoint) -> FullModel:
    """Read the full model. Raises CheckpointError if it is incomplete or damaged."""
    if checkpoint.kind == "huggingface":
        return read_huggingface(checkpoint.path)
    config = checkpoint.saved.full_model_config() if checkpoint.saved else read_config(checkpoint)
    if config is None:
        raise CheckpointError(
            f"{checkpoint.path} does not describe its model, and there is no tag next to it: name that tag"
        )
    weights: Mapping[str, Tensor]
    if checkpoint.kind == "universal":
        weights = without_padding(_universal_weights(checkpoint.path), config)
    elif checkpoint.saved:
        return FullModel(config, lazy_weights(checkpoint.saved), checkpoint.saved.description)
    else:
        weights = read_tensors(checkpoint.path)
        check_sizes(config, len(weights), str(checkpoint.path))
    return FullModel(config, in_layer_order(weights, config, str(checkpoint.path)), read_description(checkpoint))


def read_weights(checkpoint: FoundCheckpoint) -> Mapping[str, Tensor]:
    """All weights by name, even if the configuration is unknown. Raises as ``read_model``."""
    if checkpoint.kind == "universal" and checkpoint.saved is None:
        return _universal_weights(checkpoint.path)
    return read_model(checkpoint).weights


def read_huggingface(folder: Path, *, vocab_size: int | None = None) -> FullModel:
    """Read the model in a Hugging Face folder.

    If its tokenizer has ``vocab_size`` tokens, the embedding of GPT-2 and BERT is cut to ``vocab_size`` rows, since
    further rows are padding. Raises CheckpointError for a model that is not supported, and for damaged files.
    """
    config, tensors = read_folder_config(folder, vocab_size=vocab_size), read_tensors(folder)
    check_sizes(config, len(tensors), str(folder))
    weights = our_weights(tensors, read_folder_config(folder), str(folder))
    return FullModel(config, without_padding(weights, config))


def read_versions(checkpoint: FoundCheckpoint) -> dict[str, Any] | None:
    """DeepSpeed's version and Megatron's checkpoint version of a checkpoint, whose files must be verified."""
    if checkpoint.saved is None or checkpoint.kind == "universal":
        return None
    state = read_file(model_file(checkpoint.saved.path, checkpoint.saved.layout, 0))
    return {"DeepSpeed": state.get("ds_version"), "checkpoint": state.get("checkpoint_version")}


def run_metadata(model: FullModel) -> dict[str, str]:
    """The header of merged weights, from which ``read_model`` reads the configuration."""
    return {RUN_KEY: json.dumps(model.description)}


def check_optimizer(checkpoint: FoundCheckpoint) -> None:
    """Raises CheckpointError if replicated state differs between tensor-parallel ranks. The files must be verified."""
    if checkpoint.saved and checkpoint.kind != "universal":
        check_states(SavedStates(checkpoint.saved, verified=True))


def lazy_weights(saved: SavedRun) -> LazyTensors:
    """The full weights of a checkpoint, without shards and padding, each read on access.

    Raises CheckpointError if a file or a weight is missing or has another shape.
    """
    states, config = SavedStates(saved), saved.full_model_config()
    check_shards(states, optimizer=False)
    check_copies(states, optimizer=False)
    with form_errors(saved.path):
        weights = {name: states.full_weight(name) for name in states.specs}
        outlines = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in weights.items()
        }

    def read(name: str) -> Tensor:
        with form_errors(saved.path):
            return weights[name].read_all()

    return in_layer_order(LazyTensors(outlines, read), config, str(saved.path))


def _universal_weights(path: Path) -> LazyTensors:
    """The weights in ``zero/NAME/fp32.pt``, in the order of the layer numbers in their names."""
    files = {file.parent.name: file for file in (path / "zero").glob("*/fp32.pt")}
    if not files:
        raise CheckpointError(f"{path / 'zero'} holds no NAME/fp32.pt: the conversion was not finished")
    if is_present(path / "zero" / MANIFEST):
        verify(path / "zero", "*/fp32.pt")
    else:  # of an earlier version, or of DeepSpeed
        for file in files.values():
            _check_sums(file)
    number = {name: int(layer) if (layer := name.split(".")[0]).isdecimal() else -1 for name in files}
    names = sorted(files, key=lambda name: (number[name], name))
    return LazyTensors({name: _fp32(files[name]).to("meta") for name in names}, lambda name: _fp32(files[name]), files)


def _check_sums(file: Path) -> None:
    try:
        check_archive(file)
        with zipfile.ZipFile(file) as archive:
            if broken := archive.testzip():
                raise ValueError(f"{broken} is not as its checksum says")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{file} is damaged ({reason(error)}); convert the checkpoint again") from error


def _fp32(file: Path) -> Tensor:
    value = read_file(file)
    value = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise wrong(file, "param", outline(value), "a tensor of floating point")
    return value


TAG = "global_step0"


def write_checkpoint(
    folder: Path,
    model: FullModel,
    *,
    vocab_file: Path | None,
    merge_file: Path | None,
    source: Path | None = None,
    tokenizer_type: str | None = None,
    chat_template: str = "",
) -> None:
    """Write a checkpoint of iteration 0 without optimizer state, for one process without a pipeline.

    Weights keep their type, and one is in memory at a time. ``run.json`` records the tokenizer's files, its type (by
    default determined by the files), and the Hugging Face folder ``source``. Raises ResourceError if the disk has too
    little space.
    """
    run = _run(model, vocab_file, merge_file, source)
    run = replace(run, data=replace(run.data, chat_template=chat_template))
    if tokenizer_type is not None:
        run = replace(run, data=replace(run.data, tokenizer_type=tokenizer_type))
    outlines = _padded_outlines(model, run.model.padded_vocab_size)
    check_space_for(outlines, folder)
    description = describe(run, 0)
    (folder / TAG).mkdir()
    state = {
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
    _write_states(folder / TAG / "mp_rank_00_model_states.pt", state, outlines, model.weights)
    write_description(folder / TAG, description)
    publish(folder, TAG, 0)


def _write_states(
    file: Path, state: Mapping[str, Any], outlines: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Write DeepSpeed's model file of a rank: first with uninitialized weights, then each weight in place."""
    with FakeTensorMode():
        module = {name: torch.empty(outline.shape, dtype=outline.dtype) for name, outline in outlines.items()}
    with skip_data(materialize_fake_tensors=True), file.open("wb") as opened:
        try:
            torch.save({"module": module, **state}, opened)
        except RuntimeError as error:  # about the end of a file that could not be written
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
    with file.open("r+b") as opened:
        os.posix_fallocate(
            opened.fileno(), 0, file.stat().st_size
        )  # a full disk raises an error here, but SIGBUS below
    with set_default_mmap_options(mmap.MAP_SHARED):
        mapped = read_file(file)["module"]
    for name in progress_bar(outlines, desc="writing"):
        weight = weights[name]
        mapped[name][: len(weight)].copy_(weight)
        mapped[name][len(weight) :].zero_()


def _run(model: FullModel, vocab_file: Path | None, merge_file: Path | None, source: Path | None) -> RunConfig:
    """The configuration of a run that would have saved the model."""
    config = model.config
    kinds = {"tokenizer.json": HUGGINGFACE, "tokenizer.model": SENTENCEPIECE}
    kind = kinds.get(vocab_file.name if vocab_file else "", architecture_of(config).tokenizers[0])
    rows = -(-config.vocab_size // config.make_vocab_size_divisible_by) * config.make_vocab_size_divisible_by
    return RunConfig(
        model=replace(config, padded_vocab_size=rows),
        data=DataConfig(
            seq_length=config.encoder_seq_length or config.max_position_embeddings,
            decoder_seq_length=config.decoder_seq_length,
            tokenizer_type=kind,
            vocab_size=config.vocab_size if kind in PUBLISHED else None,
            vocab_file=str(vocab_file) if vocab_file else None,
            merge_file=str(merge_file) if merge_file else None,
        ),
        checkpoint=CheckpointConfig(load_hf=str(source) if source else None, no_save_optim=True, no_save_rng=True),
    )


def _padded_outlines(model: FullModel, rows: int) -> dict[str, Tensor]:
    outlines = dict(outlines_of(model.weights))
    for name, spec in architecture_of(model.config).named_parameters(model.config).items():
        if spec.is_vocabulary:
            outlines[name] = outlines[name].new_empty((rows, *spec.shape[1:]), device="meta")
    return outlines


def write_huggingface(
    folder: Path,
    model: FullModel,
    tokenizer: Vocabulary | None,
    *,
    max_shard_size: int,
    carried: Mapping[str, Path],
) -> None:
    """Write ``config.json``, the weights, the tokenizer if there is one, and the files ``carried`` into ``folder``.

    A config.json in ``carried`` is the config of the folder from which the model was read. Raises ConfigError if
    Hugging Face's model does not support a setting, ResourceError if the disk is too small.
    """
    dtype = str(next(iter(outlines_of(model.weights).values())).dtype).removeprefix("torch.")
    source = carried.get(HF_CONFIG)
    config = write_config(model.config, dtype, read_json(source) if source else None)
    if tokenizer is not None:
        config |= tokenizer.model_settings
    folder.mkdir(exist_ok=True)
    (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(their_weights(model.weights, model.config), folder, max_shard_size=max_shard_size, metadata={})
    if tokenizer is not None:
        tokenizer.write(folder, positions=model.config.max_position_embeddings)
    copy_carried({name: file for name, file in carried.items() if name != HF_CONFIG}, folder)
    if model.description is not None:
        keep_chat_template(folder, model.description)
