"""Random number streams: one that the ranks of a tensor group share, and one per rank.

Dropout of replicated tensors must be the same on every rank of the group; of tensors that are sharded, by
heads or along the sequence, it must differ. The second stream is DeepSpeed's own tracker, since its activation
checkpointing replays exactly that one.
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
    """A context in which random numbers come from the per-rank stream, or from the one the tensor group shares.

    Inside of torch.compile it changes nothing: a graph draws from the stream in whose context it is called.
    """
    return get_rng_tracker().fork() if per_rank and not torch.compiler.is_compiling() else nullcontext()


def model_parallel_manual_seed(seed: int, layout: ParallelLayout, *, iteration: int = 0) -> None:
    """Seed every stream of this process, as at the start, or as after ``iteration`` iterations.

    The shared stream differs between data-parallel ranks and pipeline stages, but not within a
    tensor group; the tracker's differs there as well.
    """
    replicas = layout.get_sequence_data_parallel_world_size()
    replica = layout.pipe_group.rank() * replicas + layout.get_sequence_data_parallel_rank()
    shared, own = np.random.SeedSequence([seed, replica, iteration]).generate_state(2)
    own = int(own) + layout.tensor_group.rank()
    random.seed(int(shared))
    np.random.seed(shared)
    torch.manual_seed(int(shared))
    get_accelerator().manual_seed_all(int(shared))
    tracker = get_rng_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_STREAM, own)
