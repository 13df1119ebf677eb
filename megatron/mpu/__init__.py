"""Megatron-LM's classic ``mpu`` library: layers, mappings, random streams, and global process groups.

After ``mpu.initialize_model_parallel()`` the process group is implicit, but may be passed. Names, arguments and results
are the same as in Megatron-LM 1 to 3. The suite itself passes a ``ParallelLayout`` as an argument, and never imports
this package.
"""

# ruff: noqa: F401, F403  # re-exports

from . import cross_entropy, data, grads, initialize, layers, mappings, random, utils
from .cross_entropy import vocab_parallel_cross_entropy
from .data import broadcast_data
from .grads import clip_grad_norm
from .initialize import *
from .layers import (
    ColumnParallelLinear,
    LinearOutput,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from .mappings import (
    copy_to_model_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .random import (
    checkpoint,
    gather_split_1d_tensor,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    split_tensor_into_1d_equal_chunks,
)
from .utils import divide, split_tensor_along_last_dim
