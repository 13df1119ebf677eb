"""Which rank does what: a value, made once and passed to whoever needs it."""

from dataclasses import dataclass

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch.distributed import ProcessGroup

from megatron.config import ParallelConfig


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's place on the (pipe, data, model) grid and its group along each axis.

    The model axis is innermost: rank = (pipe * data size + data) * model size + model. Where the ranks
    share samples along the sequence, that axis lies between data and model.
    """

    topology: ProcessTopology
    rank: int
    tensor_group: ProcessGroup
    data_group: ProcessGroup
    pipe_group: ProcessGroup
    sequence_group: ProcessGroup | None = None
    """The ranks that share a sample, a part of its sequence on each; None where it is not shared so."""
    replica_group: ProcessGroup | None = None
    """Where there is a sequence group: the ranks that hold the same weights, of all data and all parts."""
    sequence_parallel: bool = False
    """Whether the tensor group cuts along the sequence whatever it does not cut otherwise."""
    uses_dualpipev: bool = False
    """Whether the model ends on the stage on which it begins."""

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "ParallelLayout":
        """Form the groups; every rank of the started world must call it."""
        topology = _topology(parallel)
        assert topology.world_size() == dist.get_world_size()
        group = {axis: _own_group(topology.get_axis_comm_lists(axis)) for axis in topology.get_axis_names()}
        replicas = [topology.filter_match(model=rank) for rank in range(parallel.model_parallel_size)]
        return cls(
            topology,
            dist.get_rank(),
            group["model"],
            group["data"],
            group["pipe"],
            group.get("sequence"),
            _own_group(replicas) if "sequence" in group else None,
            parallel.sequence_parallel,
            parallel.uses_dualpipev,
        )

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipe_group.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipe_group.rank() == (0 if self.uses_dualpipev else self.pipe_group.size() - 1)

    # The questions DeepSpeed asks of the object it is given as `mpu`. It would ask for the sequence group's size,
    # too, and sum gradients over that group instead of averaging; ZeRO 3 does not, so we do not tell.
    def get_model_parallel_group(self) -> ProcessGroup:
        """The ranks that share each layer."""
        return self.tensor_group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that share each layer."""
        return self.tensor_group.rank()

    def get_model_parallel_world_size(self) -> int:
        """How many ranks share each layer."""
        return self.tensor_group.size()

    def get_data_parallel_group(self) -> ProcessGroup:
        """The ranks that hold the same weights and see other samples."""
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        """This rank's place among those that see other samples."""
        return self.data_group.rank()

    def get_data_parallel_world_size(self) -> int:
        """How many ranks see other samples: by them DeepSpeed checks the batch."""
        return self.data_group.size()

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """The ranks that hold the same weights: gradients are averaged, and ZeRO cuts, over all of them."""
        return self.replica_group or self.data_group

    def get_sequence_data_parallel_rank(self) -> int:
        """This rank's place among those that hold the same weights."""
        return self.get_sequence_data_parallel_group().rank()

    def get_sequence_data_parallel_world_size(self) -> int:
        """How many ranks hold the same weights."""
        return self.get_sequence_data_parallel_group().size()


def _topology(parallel: ParallelConfig) -> ProcessTopology:
    if parallel.ds_sequence_parallel_size == 1:  # the only one that the pipeline engine takes
        return PipeModelDataParallelTopology(
            num_pp=parallel.pipe_stages, num_mp=parallel.model_parallel_size, num_dp=parallel.data_parallel_size
        )
    sizes = {
        "pipe": parallel.pipe_stages,
        "data": parallel.data_parallel_size,
        "sequence": parallel.ds_sequence_parallel_size,
        "model": parallel.model_parallel_size,
    }
    return ProcessTopology(axes=list(sizes), dims=list(sizes.values()))


def _own_group(everyones: list[list[int]]) -> ProcessGroup:
    """Make every one of the groups (all ranks must, in one order) and keep this rank's."""
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in everyones}
    return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)
