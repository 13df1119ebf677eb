"""The timeline of a run is what theory says the run does, and says how long it took."""

import itertools
from pathlib import Path

import pytest
from deepspeed.runtime.pipe.schedule import BufferOpInstruction, TrainSchedule

from megatron.observe.trace.timeline import read_timeline
from megatron.pipe_schedule import Instruction, instructions

SETTINGS = "--train-iters 4 --batch-size 1 --eval-iters 1 --eval-interval 1".split()


@pytest.mark.parametrize("stages, micro_batches", itertools.product(range(1, 6), range(1, 8)))
def test_theory_is_what_deepspeed_plans(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        counts: dict[str, int] = {}
        planned = []
        for command in itertools.chain.from_iterable(TrainSchedule(micro_batches, stages, stage)):
            counts[command.name] = counts.get(command.name, 0) + 1
            number = counts[command.name] if isinstance(command, BufferOpInstruction) else None
            planned.append(Instruction(command.name, number))
        assert planned == instructions(stage, stages, micro_batches)


@pytest.mark.parametrize("stages", [2, 4])
def test_what_ranks_do_is_what_theory_draws(train_in_ranks, tmp_path: Path, stages: int) -> None:
    words = ("--gas", "6", "--pipe-parallel-size", stages, "--trace", tmp_path, "--trace-steps", "2:3")
    train_in_ranks(stages, *SETTINGS, *words)
    timeline = read_timeline(tmp_path)
    assert timeline.iterations == [2, 3]
    for rank, iteration in itertools.product(range(stages), timeline.iterations):
        events = sorted(timeline.instructions(rank, iteration), key=lambda event: event.begin)
        done = [Instruction(event.name, event.micro_batch, event.phase) for event in events]
        assert done == instructions(rank, stages, 6)
        assert all(before.end <= after.begin for before, after in itertools.pairwise(events))
