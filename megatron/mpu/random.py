"""Random streams, activation checkpointing and tensor splitting with Megatron-LM's names.

The RNG tracker is DeepSpeed's, since DeepSpeed's activation checkpointing replays it. On a CPU the functions with
``cuda`` in their name use the CPU's generator.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.tensor import mappings
from megatron.parallel.tensor.random import MODEL_PARALLEL_STREAM

from .initialize import get_tensor_model_parallel_group, get_tensor_model_parallel_rank

_MODEL_PARALLEL_RNG_TRACKER_NAME = MODEL_PARALLEL_STREAM
_OFFSET = 2718
"""Difference between the seeds of the shared and the per-rank stream, as in Megatron-LM."""


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator equally on all tensor-parallel ranks, and the tracked per-rank stream differently.

    Data-parallel ranks and pipeline stages with the same seed draw the same numbers.
    """
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    get_accelerator().manual_seed(seed)
    tracker.add(MODEL_PARALLEL_STREAM, seed + _OFFSET + get_tensor_model_parallel_rank())


def _set_cuda_rng_state(new_state: Tensor, device: int = -1) -> None:
    """Set the state of the generator of ``device`` (default: the current device)."""
    if device == -1:
        get_accelerator().set_rng_state(new_state)
    else:
        get_accelerator().set_rng_state(new_state, device)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` with activation checkpointing: it is recomputed in the backward pass with the same random
    numbers (arXiv 1604.06174). A boolean first argument, as in Megatron-LM 3, has no effect."""
    if args and isinstance(args[0], bool):
        args = args[1:]
    return checkpointing.checkpoint(function, *args)


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, group: ProcessGroup | None = None
) -> Tensor:
    """This rank's part of the flattened tensor: n elements -> [n/t], a copy with ``new_buffer``.

    Raises ValueError if n is not divisible by the number of ranks.
    """
    group = group or get_tensor_model_parallel_group()
    if tensor.numel() % group.size():
        raise ValueError(f"{tensor.numel()} elements cannot be divided equally over {group.size()} ranks")
    part = tensor.reshape(-1).chunk(group.size())[group.rank()]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Inverse of ``split_tensor_into_1d_equal_chunks``: all-gather [n/t] -> [n]. Without gradient."""
    with torch.no_grad():
        return mappings.all_gather(tensor, group or get_tensor_model_parallel_group(), 0)
