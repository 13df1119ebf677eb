"""Run on each rank by ``two_cores.py``: a few steps, and the time per step of the slowest rank.

DeepSpeed's all-reduce through shared memory is there if LOCAL_SIZE is set when it starts. It is for inference alone: it
sums over all ranks only, waits forever for a rank that has ended, and removes none of its files.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron.launch.environment import prepare_environment

STEPS, ALL_REDUCES, ROUNDS = 5, 20, 3


def main() -> None:
    """Report wall-clock time, and CPU time of all processes together, of a step; and those of an all-reduce."""
    prepare_environment(os.environ)
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]

    import deepspeed
    import torch
    import torch.distributed as dist

    from benchmarks.comparing import alternate
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from benchmarks.measures.two_cores import MICRO_BATCHES, SHAPE
    from megatron.launch.distributed import distributed
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings

    def all_reduces() -> dict[str, dict[str, list[float]]]:
        """Of the hidden states of a micro-batch: seconds of each."""
        hidden = torch.ones(SHAPE.batch, SHAPE.sequence, SHAPE.hidden)  # [b, s, h]
        ways = {
            "shared memory": lambda: dist.all_reduce(hidden, group=layout.tensor_group),
            "gloo": lambda: dist.all_reduce(hidden),
            "DeepSpeed's": lambda: deepspeed.comm.inference_all_reduce(hidden),
        }
        repeated = {name: partial(repeat, way) for name, way in ways.items()}
        times = alternate(repeated, ROUNDS, settle=dist.barrier)
        return {
            name: {"wall": [x / ALL_REDUCES for x in of_way.wall], "cpu": [x / ALL_REDUCES for x in of_way.cpu]}
            for name, of_way in times.items()
        }

    def repeat(way: Callable[[], object]) -> None:
        for _ in range(ALL_REDUCES):
            way()

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
            sums = all_reduces() if layout.tensor_group.size() > 1 else {}
        if layout.rank == 0:
            report({"wall": times.item(), "cpu": work.item(), "all_reduces": sums})
            for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"):
                file.unlink()


main()
