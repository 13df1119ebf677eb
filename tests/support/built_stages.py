"""The real layers of any rank of any number of processes, without memory and without the others."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.config import ParallelConfig, RunConfig
from megatron.engines import deepspeed_silenced
from megatron.engines.build import freeze
from megatron.engines.containers import SequentialModel, build_layers
from megatron.model.architectures import architecture_of
from megatron.model.embedding import without_segment_ids
from megatron.model.partition import layers_per_chunk, partition_boundaries
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import chunks_of


@contextmanager
def fake_layout(parallel: ParallelConfig, rank: int) -> Iterator[ParallelLayout]:
    """The layout of ``rank`` with fake process groups, whose collectives do nothing."""
    with deepspeed_silenced(verbose=False):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
    try:
        yield ParallelLayout.create(parallel)
    finally:
        dist.destroy_process_group()


def built_stage(run: RunConfig, layout: ParallelLayout) -> SequentialModel:
    """The layers of a rank's stage that have parameters, on the meta device."""
    ends, stage = partition_boundaries(layers_per_chunk(run), run.model), layout.pipe_group.rank()
    schedule, stages = run.parallel.pipeline_schedule, run.parallel.pipe_stages
    chunks = chunks_of(schedule, stage, stages, run.parallel.chunks_per_stage)
    own = {number for chunk in chunks for number in range(ends[chunk], ends[chunk + 1])}
    architecture = architecture_of(run.model)
    layers = build_layers(architecture.layers(run.model), run.model, layout)
    of_stage = [layer if number in own else without_segment_ids for number, layer in enumerate(layers)]
    with torch.device("meta"):
        model = SequentialModel(of_stage, architecture.build_loss(run.model, layout), run.activation)
    freeze(model, run.model)
    return model


def first_rank_of_each_stage(parallel: ParallelConfig) -> range:
    """One rank for each pipeline stage."""
    return range(0, parallel.world_size, parallel.world_size // parallel.pipe_stages)
