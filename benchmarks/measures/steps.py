"""Run on each rank by ``two_cores.py``: a few steps, and the time per step of the slowest rank.

DeepSpeed's all-reduce through shared memory is for inference alone: it sums over all ranks only, waits forever for a
rank that has ended, and removes none of its files. Training does not build it; this program does.
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
    os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]  # without it, DeepSpeed's all-reduce is gloo's

    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from benchmarks.comparing import alternate
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from benchmarks.measures.two_cores import MICRO_BATCHES, SHAPE
    from megatron.engines import deepspeed_silenced, silence_known_warnings
    from megatron.launch.distributed import distributed

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

    def build_deepspeed_all_reduce() -> None:
        """As the constructor of DeepSpeed's TorchBackend does."""
        operators = get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
        operators.initialize(dist.get_world_size(), dist.get_rank())
        deepspeed.comm.comm.cdb.shm_vector_kernel_level = operators.vector_kernel_level()

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
            sums = {}
            if layout.tensor_group.size() > 1:
                build_deepspeed_all_reduce()
                sums = all_reduces()
        if layout.rank == 0:
            report({"wall": times.item(), "cpu": work.item(), "all_reduces": sums})
            for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{os.environ['MASTER_PORT']}_*"):
                file.unlink()


main()
