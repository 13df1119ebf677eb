"""Started on each rank by ``memory.py``: what is planned for this rank, and what an engine takes on it."""

import os
import sys

from megatron.launch.environment import prepare_environment

MICRO_BATCHES = 4


def main() -> None:
    """Report planned and measured bytes by kind, and the growth of the process, of each rank."""
    prepare_environment(os.environ)

    from itertools import repeat

    import torch
    import torch.distributed as dist

    from benchmarks.measures.live_memory import measured_memory
    from benchmarks.measures.memory import SHAPE, TINY
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from benchmarks.resident import highest_since_lowered, lower_mark, resident_now
    from megatron.data.loader import Batch
    from megatron.engines import deepspeed_silenced, silence_known_warnings
    from megatron.launch.distributed import distributed
    from megatron.tools.planning.memory import stage_memory

    silence_known_warnings()
    run = run_of(SHAPE, *sys.argv[1:], micro_batches=MICRO_BATCHES)
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))  # [b, s]
    batch = Batch(tokens, (labels, torch.full(labels.shape, 1 / labels.numel())))

    def growth_of_the_process() -> int:
        zeros = torch.zeros(TINY.batch, TINY.sequence, dtype=torch.long)
        engine_step(run_of(TINY, *sys.argv[1:], micro_batches=MICRO_BATCHES), layout, zeros, zeros)()
        before = resident_now()
        step = engine_step(run, layout, tokens, labels)
        step(), step()
        lower_mark()
        step()
        return highest_since_lowered() - before

    with distributed(run.parallel) as layout:
        with deepspeed_silenced(verbose=False):
            resident = growth_of_the_process()
            measured = measured_memory(run, layout, repeat(batch))
        memory = stage_memory(run, layout.get_sequence_data_parallel_rank())[layout.pipe_group.rank()]
        mine = {"planned": {**memory.parts(), "total": memory.total}, "measured": measured, "resident": resident}
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if layout.rank == 0:
            report(found)


main()
