"""The random streams of one process, as a checkpoint keeps them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator

from megatron.mpu.random import get_rng_tracker


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
