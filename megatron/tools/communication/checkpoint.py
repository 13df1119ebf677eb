"""The checkpoint of a start of which some ranks were run: what the ranks of the next start load."""

import re
import shutil
from collections.abc import Sequence
from functools import cache
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
from megatron.checkpoint.run_file import SavedLayout
from megatron.checkpoint.tensor_files import read_file
from megatron.tools.one_rank.accelerator import DEVICE


def gather(checkpoints: Sequence[Path], folder: Path, tensor_ranks: int) -> None:
    """The ``checkpoints`` of the ranks that were run as one in ``folder``.

    Files of weights of tensor-parallel ranks that were not run are links to those of the first: DeepSpeed counts the
    files of a layer, and ranks that stand for others read theirs.
    """
    for checkpoint in checkpoints:
        shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    for file in sorted(folder.glob("*/*model_states.pt")):
        begin, number, end = re.split(r"(\d+)(?=.model_states.pt)", file.name)
        if int(number) % tensor_ranks == 0:
            for other in range(int(number) + 1, int(number) + tensor_ranks):
                link = file.with_name(f"{begin}{other:02}{end}")
                if not link.exists():
                    link.hardlink_to(file)
    for manifest in folder.glob(f"*/{MANIFEST}"):
        manifest.unlink()
        write_manifest(manifest.parent, {})


def state_without_files(states: SavedStates, name: str, shape: Sequence[int], *_: int) -> State:
    """In place of ``SavedStates.shard``: a checkpoint may lack the files of ranks that were not run.

    The state has what rank 0 keeps of its first parameter.
    """
    saved = states.saved
    kept = _kept(saved.path, saved.layout) if saved.has_optimizer else {}
    full = torch.zeros(tuple(shape), device=DEVICE)
    return {WEIGHT: full, **{key: full if is_flat(value) else value for key, value in kept.items()}}


@cache
def _kept(path: Path, layout: SavedLayout) -> dict[str, Any]:
    if layout.has_optimizer_partitions:
        state = read_file(optimizer_file(path, layout, 0, 0), mapped=True)["optimizer_state_dict"]
    else:
        state = read_file(model_file(path, layout, 0), mapped=True)["optimizer"]
    return numbered_state(state.get("base_optimizer_state") or state.get("optimizer_state_dict") or state, 0)
