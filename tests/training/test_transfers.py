"""Tensors between pipeline stages: no stage waits for a receiver that is late."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.programs import TINY_MODEL
from torch import Tensor

from megatron.config import ParallelConfig
from megatron.parallel.layout import ParallelLayout


@pytest.mark.ranks(2)
def test_groups_that_only_some_ranks_have_keep_nobody_waiting() -> None:
    for _ in range(2):
        dist.new_group([0])
    assert ParallelLayout.create(ParallelConfig(pipe_parallel_size=2, world_size=2)).pipe_group.size() == 2


def train_with_a_late_stage(words: list[str], begun: Path) -> int:
    """Stage 1 begins each iteration when stage 0 has begun its second forward pass. Returns the iterations."""
    from support.training import pretrain

    from megatron.engines.pipelined_engine import PipelinedEngine

    train, forward = PipelinedEngine.train_batch, PipelinedEngine._exec_forward_pass
    iterations: list[int] = []

    def train_late(engine: PipelinedEngine, *arguments: Any) -> Tensor:
        iterations.append(0)
        deadline = time.monotonic() + 60
        while engine.stage_id == 1 and not begun.exists():
            assert time.monotonic() < deadline, "the first stage waits for the second one, which is late"
            time.sleep(0.01)
        begun.unlink(missing_ok=True)
        return train(engine, *arguments)

    def forward_counted(engine: PipelinedEngine, buffer: int) -> None:
        iterations[-1] += 1
        if engine.stage_id == 0 and iterations[-1] == 2:  # it precedes the first backward pass
            begun.touch()
        forward(engine, buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelinedEngine, "train_batch", train_late)
        patch.setattr(PipelinedEngine, "_exec_forward_pass", forward_counted)
        code, output = pretrain(words)
    assert code == 0, output
    return len(iterations)


def test_a_late_stage_does_not_delay_the_next_forward_pass(run_ranks_once, programs, tmp_path: Path) -> None:
    flags = "--pipe-parallel-size 2 --batch-size 2 --gas 4 --train-iters 3 --eval-iters 0".split()
    words = [*TINY_MODEL, *programs.data_arguments, *flags]
    assert run_ranks_once(2, train_with_a_late_stage, words, tmp_path / "begun") == [3, 3]
