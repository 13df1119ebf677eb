"""The grid of a pipeline as DeepSpeed knows it, made of the process groups of a ``ParallelLayout``.

DeepSpeed 0.19.8: runtime/pipe/topology.py, ``PipelineParallelGrid`` makes the groups of all ranks of the world on every
rank, one after the other, and for each rank searches the lists of all pipelines.
Test: tests/engines/test_grid.py. Remove when it accepts groups.
"""

from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from megatron.engines.overrides import overrides
from megatron.parallel.layout import ParallelLayout


class LayoutGrid(PipelineParallelGrid):
    """The grid of ``layout``, whose groups it uses."""

    @overrides(PipelineParallelGrid, "(self, topology=None, process_group=None)")
    def __init__(self, layout: ParallelLayout, topology: Any, process_group: Any = None) -> None:
        self.global_rank, self.world_size, self._topo = layout.rank, dist.get_world_size(), topology
        data_group = layout.get_sequence_data_parallel_group()
        self.pipe_parallel_size, self.stage_id = layout.pipe_group.size(), layout.pipe_group.rank()
        self.data_parallel_size, self.data_parallel_id = data_group.size(), data_group.rank()
        self.model_parallel_size = self.slice_parallel_size = layout.tensor_group.size()
        self.is_first_stage, self.is_last_stage = self.stage_id == 0, self.stage_id == self.pipe_parallel_size - 1
        self.ds_model_proc_group = layout.model_group
        self.ds_model_rank, self.ds_model_world_size = layout.model_group.rank(), layout.model_group.size()
        self.dp_proc_group, self.dp_group = data_group, dist.get_process_group_ranks(data_group)
        self.pp_proc_group, self.pp_group = layout.pipe_group, dist.get_process_group_ranks(layout.pipe_group)
        self.slice_proc_group, self.slice_group = (
            layout.tensor_group, dist.get_process_group_ranks(layout.tensor_group),
        )  # fmt: skip
        self.p2p_groups: list[list[int]] = []  # for versions of torch without send and receive
