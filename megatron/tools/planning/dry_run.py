"""``--dry-run``: the layers of single ranks, built on the meta device with fake process groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.common.units import with_prefix
from megatron.config import ParallelConfig, RunConfig
from megatron.engines import deepspeed_silenced
from megatron.engines.build import freeze
from megatron.engines.containers import SequentialModel, build_layers
from megatron.model.architectures import architecture_of
from megatron.model.embedding import without_segment_ids
from megatron.model.partition import layers_per_chunk, partition_boundaries
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import chunks_of
from megatron.tools.planning.explain import ranks_as_text
from megatron.tools.planning.memory import stage_memory
from megatron.training.summary import describe_config, describe_stages


def dry_run(run: RunConfig) -> None:
    """Print parameters, groups and memory of each rank in ``--rank``.

    ``run`` has been checked, and its vocabulary is settled. Nothing is computed.
    """
    for name, text in describe_config(run).items():
        print(f"> {name:9} {text}")
    if run.parallel.uses_pipeline:
        print(describe_stages(run))
    for rank in run.logging.ranks or first_rank_of_each_stage(run.parallel):
        with fake_layout(run.parallel, rank) as layout:
            print("\n".join(_describe(run, rank, layout)), flush=True)


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


def _describe(run: RunConfig, rank: int, layout: ParallelLayout) -> Iterator[str]:
    sizes = [(one.numel(), one.requires_grad) for one in built_stage(run, layout).parameters()]
    parameters, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    stage = layout.pipe_group.rank()
    some = f", {trained:,} of them trained" if trained < parameters else ""
    yield f"rank {rank}: stage {stage} of {layout.pipe_group.size()}, {parameters:,} parameters{some}"
    groups = {
        "tensor": layout.tensor_group,
        "sequence": layout.sequence_group,
        "data": layout.data_group,
        "pipe": layout.pipe_group,
    }
    for name, group in groups.items():
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            yield f"  {name:8} {ranks.index(rank)} of {len(ranks)}: [{ranks_as_text(ranks)}]"
    memory = stage_memory(run)[stage]
    parts = ", ".join(f"{name} {with_prefix(amount, 'B')}" for name, amount in memory.parts().items())
    yield f"  memory   {with_prefix(memory.total, 'B')}: {parts}"
