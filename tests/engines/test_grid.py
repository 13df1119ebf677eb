"""Process groups at scale: what a rank makes, and what it asks the store, does not grow with the world."""

import os
from collections import Counter
from datetime import timedelta
from socket import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.config import ParallelConfig
from megatron.parallel.layout import ParallelLayout


@pytest.mark.ranks(8)
def test_the_grid_of_a_pipeline_is_that_of_deepspeed() -> None:
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    from megatron.engines.pipelined_model import LayoutGrid

    layout = ParallelLayout.create(ParallelConfig(world_size=8, model_parallel_size=2, pipe_parallel_size=2))
    topology = layout.pipeline_topology
    assert _described(LayoutGrid(layout, topology)) == _described(PipelineParallelGrid(topology))


def _described(grid: Any) -> dict[str, Any]:
    groups = ("ds_model_proc_group", "dp_proc_group", "pp_proc_group", "slice_proc_group")
    numbers = {name: value for name, value in vars(grid).items() if isinstance(value, int)}
    getters = {name: getattr(grid, name)() for name in dir(grid) if name.startswith("get_") and "group" not in name}
    neighbor = grid.stage_to_global((grid.stage_id + 1) % grid.pipe_parallel_size)
    ranks = {name: dist.get_process_group_ranks(getattr(grid, name)) for name in groups}
    return {**numbers, **getters, **ranks, "neighbor": neighbor}


@pytest.mark.ranks(4)
def test_stages_that_share_a_weight_have_a_group_of_their_own() -> None:
    """Each other stage has a group of its own, and the groups made after it are the same on all ranks."""
    layout = ParallelLayout.create(ParallelConfig(world_size=4, pipe_parallel_size=4))
    for stages, sums in (([0, 3], [3, 1, 2, 3]), ([1, 2], [0, 3, 3, 3]), (range(4), [6] * 4)):
        group, ranks = layout.group_of_stages(stages)
        assert ranks == dist.get_process_group_ranks(group)
        assert _sum(group) == sums[dist.get_rank()]


def _sum(group: dist.ProcessGroup) -> int:
    number = torch.tensor([dist.get_rank()])
    dist.all_reduce(number, group=group)
    return int(number)


LAYOUT = {"model_parallel_size": 8, "pipe_parallel_size": 8}


@pytest.mark.parametrize("rank", [0, 77])
def test_operations_of_the_store_do_not_grow_with_the_world(rank: int, monkeypatch) -> None:
    few, many = (_operations(world, rank, monkeypatch) for world in (128, 10_240))
    assert few == many
    assert sum(many.values()) <= 100, many


def _operations(world: int, rank: int, monkeypatch) -> Counter:
    """What a rank asks the store at its start, and the groups that it makes, each of which may ask it twice."""
    from megatron.engines.pipelined_model import LayoutGrid
    from megatron.launch.distributed import distributed, leave_store, rendezvous_barrier
    from megatron.tools.one_rank import group
    from megatron.tools.one_rank.run import one_rank

    counted: Counter = Counter()

    class Counting(group.OneRankStore):
        def __getattribute__(self, name: str) -> Any:
            if name in ("set", "get", "add", "wait", "check"):
                counted[name] += 1
            return super().__getattribute__(name)

    monkeypatch.setattr("megatron.tools.one_rank.run.OneRankStore", Counting)
    monkeypatch.setattr("megatron.launch.distributed.listen", lambda _: socket())  # nobody connects
    with one_rank(world, rank):
        leave_store(rendezvous_barrier(os.environ, timedelta(minutes=1)), os.environ)
        with distributed(ParallelConfig(world_size=world, **LAYOUT)) as layout:
            LayoutGrid(layout, layout.pipeline_topology)
            layout.group_of_stages([0, 7])
            counted["groups, each twice"] = 2 * len(dist.distributed_c10d._world.pg_map)
    return counted
