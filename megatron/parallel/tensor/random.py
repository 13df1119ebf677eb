"""Random number streams: one shared by the ranks of a tensor group, and one per rank.

Dropout of replicated tensors must be equal on all ranks of the group; dropout of tensors that are sharded (heads or
sequence) must differ. The per-rank stream is DeepSpeed's RNG tracker, since DeepSpeed's activation checkpointing
replays it.
"""

import random
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import CudaRNGStatesTracker, get_cuda_rng_tracker

from megatron.parallel.layout import ParallelLayout

MODEL_PARALLEL_STREAM = "model-parallel-rng"


def get_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of the per-rank stream: ``with get_rng_tracker().fork(): ...``."""
    return get_cuda_rng_tracker()


def random_stream(*, per_rank: bool) -> AbstractContextManager[None]:
    """A context in which random numbers come from the per-rank stream, or from the stream shared by the tensor group.

    It has no effect inside torch.compile: a graph draws from the stream active when it is called.
    """
    return get_rng_tracker().fork() if per_rank and not torch.compiler.is_compiling() else nullcontext()


def model_parallel_manual_seed(seed: int, layout: ParallelLayout, *, iteration: int = 0) -> None:
    """Seed all random streams of this process for ``iteration``.

    The shared stream differs between data-parallel ranks and pipeline stages, but not within a tensor group; the
    per-rank stream of the tracker differs within the tensor group as well.
    """
    replicas = layout.get_sequence_data_parallel_world_size()
    replica = layout.pipe_group.rank() * replicas + layout.get_sequence_data_parallel_rank()
    shared, per_rank = np.random.SeedSequence([seed, replica, iteration]).generate_state(2)
    per_rank = int(per_rank) + layout.tensor_group.rank()
    random.seed(int(shared))
    np.random.seed(shared)
    torch.manual_seed(int(shared))
    get_accelerator().manual_seed_all(int(shared))
    tracker = get_rng_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_STREAM, per_rank)
