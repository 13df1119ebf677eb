"""Random streams: equal where the ranks of a tensor group must agree, different where they must not."""

import torch
import torch.distributed as dist

from megatron.config import ParallelConfig
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import get_rng_tracker, model_parallel_manual_seed


def test_random_streams_depend_on_the_rank(run_ranks):
    draws = run_ranks(4, draw, 2)  # ranks 0 and 1 are one tensor group, 2 and 3 another
    shared, own = zip(*draws, strict=True)
    assert shared[0] == shared[1] != shared[2] == shared[3]
    assert len(set(own)) == 4
    assert not set(own) & set(shared)
    assert run_ranks(4, draw, 2) == draws


def draw(tensor_parallel_size: int) -> tuple[float, float]:
    """One number of the shared stream and one of the tracker's; forking leaves the shared one untouched."""
    layout = ParallelLayout.create(
        ParallelConfig(model_parallel_size=tensor_parallel_size, world_size=dist.get_world_size())
    )
    model_parallel_manual_seed(11, layout)
    undisturbed = torch.rand(2)
    model_parallel_manual_seed(11, layout)
    first = torch.rand(1)
    with get_rng_tracker().fork():
        own = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), undisturbed)
    return first.item(), own.item()
