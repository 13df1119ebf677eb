"""``ParallelLayout``: this rank's coordinates and process groups, created once and passed as an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch.distributed import ProcessGroup

from megatron.config import ParallelConfig
from megatron.parallel import (
    axis_sizes,
    expert_groups,
    groups_along,
    p2p_lanes,
    process_groups,
    ring_groups,
    ulysses_groups,
)
from megatron.parallel.process_groups import maps_memory
from megatron.parallel.tensor.chunks import BY_RANK, CHUNKS


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's coordinates on the grid of ranks, and its process group along each axis."""

    topology: ProcessTopology
    rank: int
    tensor_group: ProcessGroup
    data_group: ProcessGroup
    pipe_group: ProcessGroup
    model_group: ProcessGroup
    """The ranks of one model replica: all stages and all tensor-parallel ranks."""
    p2p_groups: Mapping[tuple[int, int], ProcessGroup] = field(default_factory=dict, hash=False)
    """(sending stage, receiving stage) of this rank's pipeline to the process group for the transfer."""
    sequence_group: ProcessGroup | None = None
    """The ranks that share samples, each with a shard of the sequence; None if each rank has full sequences."""
    replica_group: ProcessGroup | None = None
    """With a sequence group: the ranks with the same weights, along the data and the sequence axis."""
    ulysses_group: ProcessGroup | None = None
    """The ranks of the sequence group that exchange sequence shards for heads around attention (Ulysses)."""
    ring_group: ProcessGroup | None = None
    """The ranks of the sequence group that exchange keys and values in attention, in zigzag order."""
    ring_gathers: bool = False
    """Whether the ring group all-gathers keys and values instead of passing them around."""
    expert_group: ProcessGroup | None = None
    """The ranks of the data group that shard the experts of a layer; None without expert parallelism."""
    expert_data_group: ProcessGroup | None = None
    """The ranks of the data group with the same experts; None without expert parallelism."""
    timeout: timedelta = timedelta(minutes=30)
    """Timeout of collectives."""
    sequence_parallel: bool = False
    """Whether activations that are not sharded otherwise by the tensor group are sharded along the sequence (Megatron's
    sequence parallelism)."""
    forward_chunks: int = 1
    """Number of chunks in which tensor-parallel layers overlap communication in the forward pass, or ``BY_RANK``."""
    is_v_shaped: bool = False
    """Whether the first pipeline stage holds the last layers as well (ZB-V, DualPipeV)."""

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "ParallelLayout":
        """Create the process groups. A collective call of all ranks."""
        assert parallel.world_size == dist.get_world_size()
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        own_group = partial(process_groups.own_group, timeout=timeout)
        process_groups.equalize_group_counts()
        has_sequence_group, ulysses, ring = parallel.sequence_ranks > 1, parallel.ulysses_size, parallel.ring_size
        experts, expert_data = expert_groups(parallel) if parallel.expert_model_parallel_size > 1 else (None, None)
        tensor_group = own_group(groups_along(parallel, "tensor"))
        pipe_group = own_group(groups_along(parallel, "pipe"))
        both = pipe_group.size() > 1 and tensor_group.size() > 1
        replica = pipe_group if pipe_group.size() > 1 else tensor_group
        return cls(
            topology=_topology(parallel),
            rank=dist.get_rank(),
            tensor_group=tensor_group,
            data_group=own_group(groups_along(parallel, "data")),
            pipe_group=pipe_group,
            model_group=own_group(groups_along(parallel, "pipe", "tensor")) if both else replica,
            p2p_groups=_p2p_groups(parallel, timeout),
            sequence_group=own_group(groups_along(parallel, "sequence")) if has_sequence_group else None,
            replica_group=own_group(groups_along(parallel, "data", "sequence")) if has_sequence_group else None,
            ulysses_group=own_group(ulysses_groups(parallel)) if ulysses > 1 else None,
            ring_group=own_group(ring_groups(parallel)) if ring > 1 else None,
            ring_gathers=parallel.cp_comm_type == "all_gather",
            expert_group=own_group(experts) if experts else None,
            expert_data_group=own_group(expert_data) if expert_data else None,
            timeout=timeout,
            sequence_parallel=parallel.sequence_parallel,
            forward_chunks=_forward_chunks(parallel, tensor_group),
            is_v_shaped=parallel.is_v_shaped,
        )

    def group_of_stages(self, stages: Sequence[int]) -> tuple[ProcessGroup, list[int]]:
        """A new process group of the ``stages`` of this rank's pipeline, and its ranks. A collective call of all ranks.

        On a rank of another stage, a group of only this rank.
        """
        pipes = self.topology.get_axis_comm_lists("pipe")
        parts = [[pipe[stage] for stage in stages] for pipe in pipes]
        ranks = next((part for part in parts if self.rank in part), [self.rank])
        return process_groups.own_group(parts, timeout=self.timeout), ranks

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is on the stage of the embedding."""
        return self.pipe_group.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipe_group.rank() == (0 if self.is_v_shaped else self.pipe_group.size() - 1)

    @property
    def pipeline_topology(self) -> PipeModelDataParallelTopology:
        """The grid for DeepSpeed's pipeline engine, in which ranks that share samples count as data-parallel."""
        replicas = self.get_sequence_data_parallel_world_size()
        return PipeModelDataParallelTopology(
            num_pp=self.pipe_group.size(), num_mp=self.tensor_group.size(), num_dp=replicas
        )

    # Methods that DeepSpeed calls on its argument `mpu`. Methods for the sequence group are left out: with them,
    # DeepSpeed would sum gradients over that group instead of averaging them, except at ZeRO 3.
    def get_model_parallel_group(self) -> ProcessGroup:
        """The ranks that share each layer."""
        return self.tensor_group

    def get_model_parallel_rank(self) -> int:
        """This rank's index in the tensor-parallel group."""
        return self.tensor_group.rank()

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share each layer."""
        return self.tensor_group.size()

    def get_data_parallel_group(self) -> ProcessGroup:
        """The ranks with the same weights, which read different samples."""
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        """This rank's index in the data-parallel group."""
        return self.data_group.rank()

    def get_data_parallel_world_size(self) -> int:
        """Ranks that read different samples; DeepSpeed checks the batch size with it."""
        return self.data_group.size()

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The ranks with the same weights, over which gradients are averaged and ZeRO partitions."""
        return self.replica_group or self.data_group

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's index among the ranks with the same weights."""
        return self.get_sequence_data_parallel_group().rank()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Ranks with the same weights."""
        return self.get_sequence_data_parallel_group().size()


def _topology(parallel: ParallelConfig) -> ProcessTopology:
    """The grid as a DeepSpeed topology, which calls the tensor axis "model"."""
    sizes = {"model" if axis == "tensor" else axis: size for axis, size in axis_sizes(parallel).items()}
    if sizes["sequence"] == 1:
        return PipeModelDataParallelTopology(num_pp=sizes["pipe"], num_mp=sizes["model"], num_dp=sizes["data"])
    return ProcessTopology(axes=list(sizes), dims=list(sizes.values()))


def _forward_chunks(parallel: ParallelConfig, tensor_group: ProcessGroup) -> int:
    """Chunks for ``--tp-comm-overlap``: symmetric memory by rank if possible, which needs sequence parallelism."""
    if not parallel.tp_comm_overlap:
        return 1
    device = get_accelerator().device_name()
    return BY_RANK if parallel.sequence_parallel and maps_memory(tensor_group, device) else CHUNKS


def _p2p_groups(parallel: ParallelConfig, timeout: timedelta) -> dict[tuple[int, int], ProcessGroup]:
    """The process groups for transfers between stages of this rank's pipeline."""
    lanes = p2p_lanes(parallel.pipe_stages, parallel.pipeline_schedule == "interleaved")
    pipes = groups_along(parallel, "pipe")
    groups = {
        lane: process_groups.own_group(pipes, timeout=timeout, transfers=True) for lane in sorted(set(lanes.values()))
    }
    return {pair: groups[lane] for pair, lane in lanes.items()}
