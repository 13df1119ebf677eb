"""``--dry-run``: the layers of single ranks, built on the meta device with fake process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.common.units import with_prefix
from megatron.config import ParallelConfig, RunConfig
from megatron.engines import deepspeed_silenced
from megatron.engines.containers import SequentialModel, build_layers
from megatron.engines.optimizers import weight_decay_groups
from megatron.model.architectures import architecture_of
from megatron.model.embedding import without_segment_ids
from megatron.model.partition import layers_per_chunk, partition_boundaries, plan
from megatron.parallel.expert import expert_group_of
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import chunks_of
from megatron.parallel.tensor.lora import train_adapters_only
from megatron.tools.planning.activations import activations
from megatron.tools.planning.explain import ranks_as_text
from megatron.tools.planning.memory import Memory
from megatron.tools.planning.memory import rank_memory as memory_of_rank
from megatron.tools.planning.states import states
from megatron.tools.planning.weights import Weight, Weights
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
        print("\n".join(_describe(rank_memory(run, rank))), flush=True)


def built_weights(run: RunConfig, layout: ParallelLayout) -> list[Weight]:
    """The parameters of a rank's built layers, in order."""
    layers = built_stage(run, layout)
    if run.model.lora_rank:
        train_adapters_only(layers)
    groups = weight_decay_groups(layers, run.model)
    decaying = {id(parameter) for group in groups if "weight_decay" not in group for parameter in group["params"]}
    return [
        Weight(
            name,
            parameter.numel(),
            id(parameter) in decaying,
            tuple(parameter.shape),
            is_trained=parameter.requires_grad,
            is_divided=expert_group_of(parameter) is not None,
        )
        for name, parameter in layers.named_parameters()
    ]


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
        return SequentialModel(of_stage, architecture.build_loss(run.model, layout), run.activation)


class Rank(NamedTuple):
    """Groups and memory of one rank."""

    number: int
    stage: int
    groups: dict[str, list[int]]
    """The ranks of its groups, itself among them."""
    memory: Memory


def first_rank_of_each_stage(parallel: ParallelConfig) -> range:
    """One rank for each pipeline stage."""
    return range(0, parallel.world_size, parallel.world_size // parallel.pipe_stages)


def rank_memory(run: RunConfig, rank: int) -> Rank:
    """``rank`` of ``run``, with the parameters of its built layers."""
    with fake_layout(run.parallel, rank) as layout:
        weights = Weights([built_weights(run, layout)])
        stage, owner = layout.pipe_group.rank(), layout.get_sequence_data_parallel_rank()
        groups = {
            "tensor": layout.tensor_group,
            "sequence": layout.sequence_group,
            "data": layout.data_group,
            "pipe": layout.pipe_group,
        }
        members = {name: dist.get_process_group_ranks(group) for name, group in groups.items() if group is not None}
    of_states = states(run, weights, owner)
    memory = memory_of_rank(run, plan(run)[stage], stage, activations(run), weights, of_states)
    return Rank(rank, stage, members, memory)


def _describe(rank: Rank) -> Iterator[str]:
    memory = rank.memory
    some = f", {memory.trained:,} of them trained" if memory.trained < memory.parameters else ""
    stage = f"stage {rank.stage} of {len(rank.groups['pipe'])}"
    yield f"rank {rank.number}: {stage}, {memory.parameters:,} parameters{some}"
    for name, ranks in rank.groups.items():
        yield f"  {name:8} {ranks.index(rank.number)} of {len(ranks)}: [{ranks_as_text(ranks)}]"
    parts = ", ".join(f"{name} {with_prefix(amount, 'B')}" for name, amount in memory.parts().items())
    yield f"  memory   {with_prefix(memory.total, 'B')}: {parts}"
