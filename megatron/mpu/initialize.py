"""Megatron-LM's global process groups, created by ``initialize_model_parallel``.

Ranks are ordered as in Megatron-LM: tensor-parallel rank innermost, then data-parallel rank, then pipeline stage.
All functions raise ConfigError if groups are needed but not initialized.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.common.errors import ConfigError, LaunchError
from megatron.config import ParallelConfig
from megatron.parallel import process_groups
from megatron.parallel.layout import ParallelLayout


@dataclass
class _Globals:
    """State set by ``initialize_model_parallel`` and the setters."""

    layout: ParallelLayout | None = None
    embedding_group: ProcessGroup | None = None
    embedding_ranks: list[int] = field(default_factory=list)
    position_embedding_group: ProcessGroup | None = None
    position_embedding_ranks: list[int] = field(default_factory=list)
    values: dict[str, int | None] = field(default_factory=dict)
    """Values of the setters, by the name of the getter without ``get_``."""


_globals = _Globals()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
) -> ParallelLayout:
    """Create the process groups, and return this rank's layout. A collective call of all ranks.

    ``virtual_pipeline_model_parallel_size`` is the number of model chunks of each stage;
    ``pipeline_model_parallel_split_rank`` is the first stage of the decoder of a model with an encoder.

    Raises LaunchError if torch.distributed is not initialized, ConfigError if the sizes do not divide the number of
    ranks or this was called before.
    """
    if not dist.is_initialized():
        raise LaunchError(
            "initialize_model_parallel: this process has joined no process group; start with torchrun, and call "
            "torch.distributed.init_process_group() or megatron.launch.distributed.distributed() first"
        )
    if model_parallel_is_initialized():
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
    layout = ParallelLayout.create(parallel)
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    _globals.layout = layout
    pipelines = layout.topology.get_axis_comm_lists("pipe")
    split = pipeline_model_parallel_split_rank
    _globals.embedding_group, _globals.embedding_ranks = _own_group(
        [_stages(pipe, 0, split, len(pipe) - 1) for pipe in pipelines], timeout
    )
    _globals.position_embedding_group, _globals.position_embedding_ranks = _own_group(
        [_stages(pipe, 0, split) for pipe in pipelines], timeout
    )
    if virtual_pipeline_model_parallel_size is not None:
        set_virtual_pipeline_model_parallel_world_size(virtual_pipeline_model_parallel_size)
        set_virtual_pipeline_model_parallel_rank(0)
    set_pipeline_model_parallel_split_rank(split)
    return layout


def _stages(pipe: list[int], *stages: int | None) -> list[int]:
    """The distinct ranks of these stages."""
    return sorted({pipe[stage] for stage in stages if stage is not None})


def _own_group(all_ranks: list[list[int]], timeout: timedelta) -> tuple[ProcessGroup | None, list[int]]:
    """Create the groups of ``all_ranks``; returns this rank's group and its ranks, or (None, []). A collective call."""
    group, rank = process_groups.own_group(all_ranks, timeout=timeout), dist.get_rank()
    return next(((group, ranks) for ranks in all_ranks if rank in ranks), (None, []))


def destroy_model_parallel() -> None:
    """Reset groups and values. The process groups themselves are destroyed with torch.distributed."""
    global _globals
    _globals = _Globals()


destroy_tensor_model_parallel = destroy_model_parallel


def model_parallel_is_initialized() -> bool:
    """Whether ``initialize_model_parallel`` has been called."""
    return _globals.layout is not None


def is_unitialized() -> bool:
    """Whether there are no groups yet. Megatron-LM's spelling."""
    return not model_parallel_is_initialized()


def get_layout() -> ParallelLayout:
    """This rank's layout."""
    if _globals.layout is None:
        raise ConfigError("model parallelism is not initialized: call mpu.initialize_model_parallel() first")
    return _globals.layout


def get_model_parallel_group() -> ProcessGroup:
    """The ranks of one model replica: all tensor-parallel ranks of all stages, as in Megatron-LM 2.

    In Megatron-LM 1 and DeepSpeed's 3D-parallelism fork this name means the tensor-parallel group, which is the same
    without pipeline stages.
    """
    return get_layout().model_group


def get_model_parallel_rank() -> int:
    """This rank's number in ``get_model_parallel_group``."""
    return get_model_parallel_group().rank()


def get_model_parallel_world_size() -> int:
    """The number of ranks in ``get_model_parallel_group``."""
    return get_model_parallel_group().size()


def get_model_parallel_src_rank() -> int:
    """The global rank of the first of ``get_model_parallel_group``."""
    return dist.get_global_rank(get_model_parallel_group(), 0)


def get_tensor_model_parallel_group() -> ProcessGroup:
    """The ranks that share each layer."""
    return get_layout().tensor_group


def get_tensor_model_parallel_rank() -> int:
    """This rank's number among the ranks that share each layer, or the number that was set."""
    value = _globals.values.get("tensor_model_parallel_rank")
    return get_tensor_model_parallel_group().rank() if value is None else value


def get_tensor_model_parallel_world_size() -> int:
    """The number of ranks that share each layer, or the number that was set."""
    value = _globals.values.get("tensor_model_parallel_world_size")
    return get_tensor_model_parallel_group().size() if value is None else value


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first rank that shares each layer with this one."""
    return dist.get_global_rank(get_tensor_model_parallel_group(), 0)


def get_data_parallel_group() -> ProcessGroup:
    """The ranks that hold the same weights and read other samples."""
    return get_layout().data_group


def get_data_parallel_rank() -> int:
    """This rank's number among the ranks that hold the same weights."""
    return get_data_parallel_group().rank()


def get_data_parallel_world_size() -> int:
    """The number of ranks that hold the same weights."""
    return get_data_parallel_group().size()


def get_data_parallel_src_rank() -> int:
    """The global rank of the first rank that holds the same weights."""
    return dist.get_global_rank(get_data_parallel_group(), 0)


def get_pipeline_model_parallel_group() -> ProcessGroup:
    """The ranks that hold the stages of one pipeline."""
    return get_layout().pipe_group


def get_pipeline_model_parallel_rank() -> int:
    """The stage of this rank, counted from 0, or the number that was set."""
    value = _globals.values.get("pipeline_model_parallel_rank")
    return get_pipeline_model_parallel_group().rank() if value is None else value


def get_pipeline_model_parallel_world_size() -> int:
    """The number of stages, or the number that was set."""
    value = _globals.values.get("pipeline_model_parallel_world_size")
    return get_pipeline_model_parallel_group().size() if value is None else value


def get_pipeline_model_parallel_first_rank() -> int:
    """The global rank of the first stage of this pipeline."""
    return _rank_of_stage(0)


def get_pipeline_model_parallel_last_rank() -> int:
    """The global rank of the last stage of this pipeline."""
    return _rank_of_stage(-1)


def get_pipeline_model_parallel_next_rank() -> int:
    """The global rank of the next stage; the first stage after the last."""
    return _rank_of_stage(get_pipeline_model_parallel_rank() + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """The global rank of the stage before; the last stage before the first."""
    return _rank_of_stage(get_pipeline_model_parallel_rank() - 1)


def _rank_of_stage(stage: int) -> int:
    ranks = dist.get_process_group_ranks(get_pipeline_model_parallel_group())
    return ranks[stage % len(ranks)]


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current model chunk, as set by the setter; None without virtual stages."""
    return _globals.values.get("virtual_pipeline_model_parallel_rank")


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """The number of model chunks of each stage; None without virtual stages."""
    return _globals.values.get("virtual_pipeline_model_parallel_world_size")


def get_pipeline_model_parallel_split_rank() -> int | None:
    """The first stage of the decoder; None if the model has no encoder or one stage has both."""
    return _globals.values.get("pipeline_model_parallel_split_rank")


def _setter(name: str) -> Callable[[int | None], None]:
    def set_value(value: int | None) -> None:
        _globals.values[name] = value

    set_value.__doc__ = f"Set the value that ``get_{name}`` returns; None restores its default."
    return set_value


set_tensor_model_parallel_rank = _setter("tensor_model_parallel_rank")
set_tensor_model_parallel_world_size = _setter("tensor_model_parallel_world_size")
set_pipeline_model_parallel_rank = _setter("pipeline_model_parallel_rank")
set_pipeline_model_parallel_world_size = _setter("pipeline_model_parallel_world_size")
set_virtual_pipeline_model_parallel_rank = _setter("virtual_pipeline_model_parallel_rank")
set_virtual_pipeline_model_parallel_world_size = _setter("virtual_pipeline_model_parallel_world_size")
set_pipeline_model_parallel_split_rank = _setter("pipeline_model_parallel_split_rank")


def is_pipeline_first_stage(ignore_virtual: bool = False) -> bool:
    """Whether this rank holds the first stage, and with virtual stages computes its first chunk."""
    chunk = get_virtual_pipeline_model_parallel_rank() if get_virtual_pipeline_model_parallel_world_size() else 0
    return get_pipeline_model_parallel_rank() == 0 and (ignore_virtual or chunk == 0)


def is_pipeline_last_stage(ignore_virtual: bool = False) -> bool:
    """Whether this rank holds the last stage, and with virtual stages computes its last chunk."""
    chunks = get_virtual_pipeline_model_parallel_world_size()
    is_last_chunk = not chunks or get_virtual_pipeline_model_parallel_rank() == chunks - 1
    is_last_stage = get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1
    return is_last_stage and (ignore_virtual or is_last_chunk)


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether stage ``rank``, this rank's by default, executes layers of the encoder; True if there is no split."""
    return _is_on_side_of_split(rank, before=True)


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether stage ``rank``, this rank's by default, executes layers of the decoder; True if there is no split."""
    return _is_on_side_of_split(rank, before=False)


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank holds the last stage of the encoder, before the decoder's first."""
    stage = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(stage) and is_pipeline_stage_after_split(stage + 1)


def _is_on_side_of_split(stage: int | None, *, before: bool) -> bool:
    split = get_pipeline_model_parallel_split_rank()
    if get_pipeline_model_parallel_world_size() == 1 or split is None:
        return True
    stage = get_pipeline_model_parallel_rank() if stage is None else stage
    return stage < split if before else stage >= split


def get_embedding_group() -> ProcessGroup:
    """The stages that hold a copy of the embedding: the first, the last, and the first of the decoder."""
    return _group_of_stages(_globals.embedding_group, "embedding")


def get_position_embedding_group() -> ProcessGroup:
    """The stages that hold a copy of the position embedding: the first, and the first of the decoder."""
    return _group_of_stages(_globals.position_embedding_group, "position embedding")


def _group_of_stages(group: ProcessGroup | None, what: str) -> ProcessGroup:
    get_layout()
    if group is None:
        raise ConfigError(f"stage {get_pipeline_model_parallel_rank()} of the pipeline has no {what}, thus no group")
    return group


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    """Whether this rank holds a copy of the embedding, and with virtual stages computes the chunk that has it."""
    rank, ranks = dist.get_rank(), _globals.embedding_ranks
    if ignore_virtual or rank not in ranks:
        return rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage()
    return rank != ranks[-1] or is_pipeline_last_stage()


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds a copy of the position embedding."""
    return dist.get_rank() in _globals.position_embedding_ranks


# Aliases used by DeepSpeed and its 3D-parallelism fork of Megatron-LM.
get_pipe_parallel_group = get_pipeline_model_parallel_group
get_pipe_parallel_rank = get_pipeline_model_parallel_rank
get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
