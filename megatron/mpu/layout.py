"""Which rank does what: a value, made once and passed to whoever needs it."""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from torch.distributed import ProcessGroup

from megatron.config import ParallelConfig
from megatron.launch.quiet import deepspeed_silenced


@dataclass(frozen=True)
class ParallelLayout:
    """This rank's place on the (pipe, data, model) grid and its group along each axis.

    The model axis is innermost: rank = (pipe * data size + data) * model size + model.
    """

    topology: ProcessTopology
    rank: int
    tensor_group: ProcessGroup
    data_group: ProcessGroup
    pipe_group: ProcessGroup

    @classmethod
    def create(cls, parallel: ParallelConfig) -> "ParallelLayout":
        """Form the groups; every rank of the started world must call it."""
        topology = PipeModelDataParallelTopology(
            num_pp=parallel.pipe_stages, num_mp=parallel.model_parallel_size, num_dp=parallel.data_parallel_size
        )
        assert topology.world_size() == dist.get_world_size()
        group = {axis: _own_group(topology, axis) for axis in ("pipe", "data", "model")}
        return cls(topology, dist.get_rank(), group["model"], group["data"], group["pipe"])

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pipe_group.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipe_group.rank() == self.pipe_group.size() - 1

    # The questions DeepSpeed asks of the object it is given as `mpu`.
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
        """The ranks that hold the same weights."""
        return self.data_group

    def get_data_parallel_rank(self) -> int:
        """This rank's place among those that hold the same weights."""
        return self.data_group.rank()

    def get_data_parallel_world_size(self) -> int:
        """How many ranks hold the same weights."""
        return self.data_group.size()


@contextmanager
def distributed(parallel: ParallelConfig, *, verbose: bool = False) -> Iterator[ParallelLayout]:
    """Join the other ranks, and part from them on the way out.

    Without the parting gloo aborts now and then at the end of the process.
    """
    with deepspeed_silenced(verbose):
        deepspeed.init_distributed(
            dist_backend=_backend(parallel),
            timeout=datetime.timedelta(minutes=parallel.distributed_timeout_minutes),
            verbose=verbose,
        )
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
        layout = ParallelLayout.create(parallel)
    yield layout
    dist.destroy_process_group()


def _backend(parallel: ParallelConfig) -> str:
    # DeepSpeed's own name for CPU is ccl, which it then replaces by gloo with a warning.
    return parallel.distributed_backend or ("gloo" if get_accelerator().device_name() == "cpu" else "nccl")


def _own_group(topology: ProcessTopology, axis: str) -> ProcessGroup:
    """Make every group along ``axis`` (all ranks must, in one order) and keep this rank's."""
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in topology.get_axis_comm_lists(axis)}
    return next(group for ranks, group in groups.items() if dist.get_rank() in ranks)
