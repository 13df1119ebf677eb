"""The checkpoint of a start of which some ranks were run: what the ranks of the next start load."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import MANIFEST, write_manifest
from megatron.checkpoint.parameter_state import (
    WEIGHT,
    SavedStates,
    State,
    is_flat,
    model_file,
    numbered_state,
    optimizer_file,
)
from megatron.checkpoint.tensor_files import read_file
from megatron.tools.one_rank.accelerator import DEVICE


def gather(checkpoints: Sequence[Path], folder: Path) -> None:
    """The ``checkpoints`` of the ranks that were run as one in ``folder``."""
    for checkpoint in checkpoints:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    for manifest in folder.glob(f"*/{MANIFEST}"):
        manifest.unlink()
        write_manifest(manifest.parent, {})


def state_without_files(states: SavedStates, name: str, shape: Sequence[int], *_: int) -> State:
    """In place of ``SavedStates.shard``: a checkpoint may lack the files of ranks that were not run.

    The state has what rank 0 keeps of its first parameter.
    """
    saved, kept = states.saved, dict[str, Any]()
    if saved.has_optimizer:
        if saved.layout.has_optimizer_partitions:
            state = read_file(optimizer_file(saved.path, saved.layout, 0, 0), mapped=True)["optimizer_state_dict"]
        else:
            state = read_file(model_file(saved.path, saved.layout, 0), mapped=True)["optimizer"]
        kept = numbered_state(state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state, 0)
    full = torch.zeros(tuple(shape), device=DEVICE)
    return {WEIGHT: full, **{key: full if is_flat(value) else value for key, value in kept.items()}}
