"""Tensor parallelism under Megatron's classic names: ``mpu.ColumnParallelLinear`` and so on.

Layers and mappings take their process group as an argument. ``mpu.get_tensor_model_parallel_rank()`` and the like
answer after ``mpu.initialize_model_parallel()``; ``ParallelLayout`` answers the same without a global.
"""

# ruff: noqa: F401  # these names are what the package offers

from megatron.mpu.initialize import (
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_layout,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
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
    gather_split_1d_tensor,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
    scatter_to_sequence_parallel_region,
    split_tensor_into_1d_equal_chunks,
)
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed, random_stream

# Other names of the same functions: those of Megatron-core, and those from before tensor and pipeline parallelism.
get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_rank = get_tensor_model_parallel_rank
get_model_parallel_src_rank = get_tensor_model_parallel_src_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_pipe_parallel_group = get_pipeline_model_parallel_group
get_pipe_parallel_rank = get_pipeline_model_parallel_rank
get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
copy_to_tensor_model_parallel_region = copy_to_model_parallel_region
reduce_from_tensor_model_parallel_region = reduce_from_model_parallel_region
scatter_to_tensor_model_parallel_region = scatter_to_model_parallel_region
gather_from_tensor_model_parallel_region = gather_from_model_parallel_region
get_cuda_rng_tracker = get_rng_tracker
model_parallel_cuda_manual_seed = model_parallel_manual_seed
