"""Steps of all ranks: results reach rank 0 in order along the axes of a layout, and errors reach every rank."""

import os
from collections.abc import Callable

import pytest
import torch.distributed as dist
from support.command_lines import SMALL

from megatron.checkpoint.collective_errors import gathered_on_rank_0, on_all_ranks
from megatron.cli import parse_run
from megatron.common.errors import CheckpointError, UserError
from megatron.launch.distributed import distributed


def failing_on(*ranks: int) -> Callable[[], int]:
    def step() -> int:
        if dist.get_rank() in ranks:
            raise CheckpointError(f"rank {dist.get_rank()} cannot")
        return dist.get_rank()

    return step


@pytest.mark.ranks(4)
@pytest.mark.parametrize("words", ["--model-parallel-size 2", "--pipe-parallel-size 2", "--context-parallel-size 4"])
def test_results_and_errors(words: str) -> None:
    run = parse_run([*SMALL.split(), *words.split()], os.environ)
    with distributed(run.parallel) as layout:
        groups = layout.axis_groups
        assert max(group.size() for group in groups) < 4 or len(groups) == 1
        assert gathered_on_rank_0(failing_on(), tuple, groups) == (0, 1, 2, 3)
        assert on_all_ranks(failing_on()) == dist.get_rank()
        for step in (
            lambda: on_all_ranks(failing_on(3, 1)),
            lambda: gathered_on_rank_0(failing_on(3, 1), tuple, groups),
        ):
            with pytest.raises(UserError, match="rank 1 cannot") as caught:
                step()
            assert isinstance(caught.value, CheckpointError) and caught.value.on_every_rank
