"""Run on each rank by ``two_cores.py``: a few steps, and the time per step of the slowest rank."""

import os
import sys
import time

from megatron.launch.environment import prepare_environment

STEPS, ALL_REDUCES = 5, 50


def main() -> None:
    """Report wall-clock time, and CPU time of all processes together, of a step; and the time of an all-reduce."""
    prepare_environment(os.environ)

    import torch
    import torch.distributed as dist

    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from benchmarks.measures.two_cores import MICRO_BATCHES, SHAPE
    from megatron.launch.distributed import distributed
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings

    def seconds_of_all_reduce() -> float:
        hidden = torch.ones(SHAPE.batch, SHAPE.sequence, SHAPE.hidden)  # [b, s, h]
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(ALL_REDUCES):
            dist.all_reduce(hidden)
        return (time.perf_counter() - begin) / ALL_REDUCES

    silence_known_warnings()
    run = run_of(SHAPE, *sys.argv[1:], "--global-batch-size", str(MICRO_BATCHES))
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))
    with distributed(run.parallel) as layout:
        with deepspeed_silenced(verbose=False):
            step = engine_step(run, layout, tokens, labels)
            step(), step()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                step()
            wall, cpu = (
                (now - then) / STEPS for now, then in ((time.perf_counter(), wall), (time.process_time(), cpu))
            )
            times = torch.tensor([wall])
            dist.all_reduce(times, op=dist.ReduceOp.MAX)
            work = torch.tensor([cpu])
            dist.all_reduce(work)
            all_reduce = seconds_of_all_reduce()
        if layout.rank == 0:
            report({"wall": times.item(), "cpu": work.item(), "all_reduce": all_reduce})


main()
