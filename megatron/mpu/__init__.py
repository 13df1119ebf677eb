"""Tensor parallelism under Megatron's classic names: ``mpu.ColumnParallelLinear`` and so on.

Every function takes its process group as an argument; what ``mpu.get_...`` answers in Megatron-LM is answered by
``ParallelLayout``, such as ``layout.get_model_parallel_group()``.
"""

# ruff: noqa: F401  # these names are what the package offers

from megatron.parallel.layout import ParallelLayout
from megatron.parallel.sequence import all_to_all
from megatron.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightInit,
    all_reduce_gradient,
)
from megatron.parallel.tensor.mappings import (
    broadcast_data,
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed, random_stream

# Megatron-core's names of the same functions.
copy_to_tensor_model_parallel_region = copy_to_model_parallel_region
reduce_from_tensor_model_parallel_region = reduce_from_model_parallel_region
scatter_to_tensor_model_parallel_region = scatter_to_model_parallel_region
gather_from_tensor_model_parallel_region = gather_from_model_parallel_region
get_cuda_rng_tracker = get_rng_tracker
model_parallel_cuda_manual_seed = model_parallel_manual_seed
