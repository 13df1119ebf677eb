"""Tensor parallelism under Megatron's classic names: ``mpu.ColumnParallelLinear`` and so on.

Layers and mappings take their process group as an argument. ``mpu.get_tensor_model_parallel_rank()`` and the like
answer after ``mpu.initialize_model_parallel()``, for programs that were written with the classic globals. The suite
itself passes its ``ParallelLayout`` as an argument, and never imports this package.
"""

# ruff: noqa: F401  # these names are what the package offers

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.common.errors import ConfigError, LaunchError
from megatron.config import ParallelConfig
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

_layouts: list[ParallelLayout] = []
"""The layout of this process, or nothing."""


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1, pipeline_model_parallel_size: int = 1
) -> ParallelLayout:
    """Divide the ranks of torch.distributed into groups, and return this rank's layout. Every rank must call it.

    Raises LaunchError if this process has joined no process group, ConfigError if the sizes do not divide its ranks or
    this has been called before.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "initialize_model_parallel: this process has joined no process group; start with torchrun, and call "
            "torch.distributed.init_process_group() or megatron.launch.distributed.distributed() first"
        )
    if _layouts:
        raise ConfigError("initialize_model_parallel was called before: call destroy_model_parallel() first")
    world, replica = dist.get_world_size(), tensor_model_parallel_size * pipeline_model_parallel_size
    if replica < 1 or world % replica:
        raise ConfigError(
            f"initialize_model_parallel: {world} ranks cannot be divided into tensor-parallel size "
            f"{tensor_model_parallel_size} x pipeline-parallel size {pipeline_model_parallel_size}"
        )
    parallel = ParallelConfig(
        model_parallel_size=tensor_model_parallel_size,
        pipe_parallel_size=pipeline_model_parallel_size,
        world_size=world,
    )
    _layouts.append(ParallelLayout.create(parallel))
    return _layouts[0]


def destroy_model_parallel() -> None:
    """Forget the layout. Its process groups end with torch.distributed's."""
    _layouts.clear()


def model_parallel_is_initialized() -> bool:
    """Whether ``initialize_model_parallel`` has been called."""
    return bool(_layouts)


def get_layout() -> ParallelLayout:
    """This rank's layout. Raises ConfigError if ``initialize_model_parallel`` has not been called."""
    if not _layouts:
        raise ConfigError("model parallelism is not initialized: call mpu.initialize_model_parallel() first")
    return _layouts[0]


def get_tensor_model_parallel_group() -> ProcessGroup:
    """The ranks that share each layer."""
    return get_layout().tensor_group


def get_tensor_model_parallel_rank() -> int:
    """This rank's number among those that share each layer."""
    return get_layout().tensor_group.rank()


def get_tensor_model_parallel_world_size() -> int:
    """How many ranks share each layer."""
    return get_layout().tensor_group.size()


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of those that share each layer."""
    return dist.get_global_rank(get_layout().tensor_group, 0)


def get_data_parallel_group() -> ProcessGroup:
    """The ranks that hold the same weights and read other samples."""
    return get_layout().data_group


def get_data_parallel_rank() -> int:
    """This rank's number among those that read other samples."""
    return get_layout().data_group.rank()


def get_data_parallel_world_size() -> int:
    """How many ranks read other samples."""
    return get_layout().data_group.size()


def get_pipeline_model_parallel_group() -> ProcessGroup:
    """The ranks that hold the pipeline stages of one replica."""
    return get_layout().pipe_group


def get_pipeline_model_parallel_rank() -> int:
    """The pipeline stage of this rank, counted from 0."""
    return get_layout().pipe_group.rank()


def get_pipeline_model_parallel_world_size() -> int:
    """How many pipeline stages there are."""
    return get_layout().pipe_group.size()


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
