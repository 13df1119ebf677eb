"""The place of this rank among all ranks: a value, created once and passed to whatever needs it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch.distributed import ProcessGroup

from megatron.config import ParallelConfig
from megatron.parallel import axis_sizes, expert_groups, groups_along, ring_groups, ulysses_groups
from megatron.parallel.shared_memory import backend_of_groups


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's coordinates on the grid of ranks, and its process group along each axis."""

    topology: ProcessTopology
    rank: int
    tensor_group: ProcessGroup
    data_group: ProcessGroup
    pipe_group: ProcessGroup
    sequence_group: ProcessGroup | None = None
    """The ranks that share samples, each with a shard of the sequence; None if each rank has whole samples."""
    replica_group: ProcessGroup | None = None
    """With a sequence group: the ranks that hold the same weights, along both axes."""
    ulysses_group: ProcessGroup | None = None
    """Those of the sequence group that exchange parts of the sequence for heads around attention."""
    ring_group: ProcessGroup | None = None
    """Those of the sequence group that see one another's keys and values in attention, in zigzag order."""
    ring_gathers: bool = False
    """Whether they gather keys and values at once, instead of passing them around."""
    expert_group: ProcessGroup | None = None
    """Within the data group: the ranks that divide the experts of a layer among them; None without expert
    parallelism."""
    expert_data_group: ProcessGroup | None = None
    """With it: the ranks of the data group that hold the same experts."""
    sequence_parallel: bool = False
    """Whether the tensor group shards along the sequence whatever it does not shard otherwise (Megatron's)."""
    is_v_shaped: bool = False
    """Whether the model ends on the stage on which it begins."""

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "ParallelLayout":
        """Form the groups. A collective call: every rank of the world makes it."""
        assert parallel.world_size == dist.get_world_size()
        own_group = partial(_own_group, timeout=timedelta(minutes=parallel.distributed_timeout_minutes))
        has_sequence_group, ulysses, ring = parallel.sequence_ranks > 1, parallel.ulysses_size, parallel.ring_size
        experts, expert_data = expert_groups(parallel) if parallel.expert_model_parallel_size > 1 else (None, None)
        return cls(
            topology=_topology(parallel),
            rank=dist.get_rank(),
            tensor_group=own_group(groups_along(parallel, "tensor")),
            data_group=own_group(groups_along(parallel, "data")),
            pipe_group=own_group(groups_along(parallel, "pipe")),
            sequence_group=own_group(groups_along(parallel, "sequence")) if has_sequence_group else None,
            replica_group=own_group(groups_along(parallel, "data", "sequence")) if has_sequence_group else None,
            ulysses_group=own_group(ulysses_groups(parallel)) if ulysses > 1 else None,
            ring_group=own_group(ring_groups(parallel)) if ring > 1 else None,
            ring_gathers=parallel.cp_comm_type == "all_gather",
            expert_group=own_group(experts) if experts else None,
            expert_data_group=own_group(expert_data) if expert_data else None,
            sequence_parallel=parallel.sequence_parallel,
            is_v_shaped=parallel.is_v_shaped,
        )

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipe_group.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipe_group.rank() == (0 if self.is_v_shaped else self.pipe_group.size() - 1)

    @property
    def pipeline_topology(self) -> PipeModelDataParallelTopology:
        """The grid as DeepSpeed's pipeline engine knows it: ranks that share samples average gradients like others."""
        replicas = self.get_sequence_data_parallel_world_size()
        return PipeModelDataParallelTopology(
            num_pp=self.pipe_group.size(), num_mp=self.tensor_group.size(), num_dp=replicas
        )

    # The methods that DeepSpeed calls on its argument `mpu`. Those for the sequence group are left out: DeepSpeed
    # would sum gradients over that group instead of averaging them, except at ZeRO 3.
    def get_model_parallel_group(self) -> ProcessGroup:
        """The ranks that share each layer."""
        return self.tensor_group

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that share each layer."""
        return self.tensor_group.rank()

    def get_model_parallel_world_size(self) -> int:
        """How many ranks share each layer."""
        return self.tensor_group.size()

    def get_data_parallel_group(self) -> ProcessGroup:
        """The ranks that hold the same weights and read other samples."""
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        """This rank's number among those that read other samples."""
        return self.data_group.rank()

    def get_data_parallel_world_size(self) -> int:
        """How many ranks read other samples; DeepSpeed checks the batch by it."""
        return self.data_group.size()

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The ranks that hold the same weights: gradients are averaged, and ZeRO partitions, over all of them."""
        return self.replica_group or self.data_group

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's number among those that hold the same weights."""
        return self.get_sequence_data_parallel_group().rank()

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many ranks hold the same weights."""
        return self.get_sequence_data_parallel_group().size()


def _topology(parallel: ParallelConfig) -> ProcessTopology:
    """The same grid for DeepSpeed, which calls the tensor axis "model"."""
    sizes = {"model" if axis == "tensor" else axis: size for axis, size in axis_sizes(parallel).items()}
    if sizes["sequence"] == 1:
        return PipeModelDataParallelTopology(num_pp=sizes["pipe"], num_mp=sizes["model"], num_dp=sizes["data"])
    return ProcessTopology(axes=list(sizes), dims=list(sizes.values()))


def _own_group(all_groups: Sequence[Sequence[int]], timeout: timedelta) -> ProcessGroup:
    """Create all of the groups, as every rank has to in the same order, and return this rank's.

    Without ``timeout`` a group would have torch's own: 10 minutes with NCCL, 30 with gloo.
    """
    backend = backend_of_groups(get_accelerator().device_name())
    groups = {tuple(ranks): dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in all_groups}
    return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)
