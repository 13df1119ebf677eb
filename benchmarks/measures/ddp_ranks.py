"""Run on each of two ranks by ``ddp.py``: this project's engines and torch's DDP in alternation."""

import os
import sys
from contextlib import nullcontext
from dataclasses import asdict

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Report wall-clock time, and CPU time of both ranks together, of each implementation."""
    prepare_environment(os.environ)

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.comparing import Times, alternate
    from benchmarks.measures.ddp import MICRO_BATCHES, SHAPE, WAYS
    from benchmarks.measures.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, WithWeights
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from megatron.launch.distributed import distributed
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings
    from megatron.training.engines import build_module

    def run_with(*flags: str):
        return run_of(SHAPE, *flags, "--global-batch-size", str(MICRO_BATCHES))

    def peer(module: nn.Module):
        """A step of a plain loop over this rank's half of the micro-batches."""
        own = MICRO_BATCHES // dist.get_world_size()
        model = DistributedDataParallel(WithWeights(module, labels))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

        def step() -> None:
            for number in range(own):
                with model.no_sync() if number < own - 1 else nullcontext():
                    (model(tokens, labels) / own).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def of_all_ranks(times: Times) -> Times:
        """Barriers make the clock's seconds those of all; the processors' are added up."""
        cpu = torch.tensor(times.cpu)
        dist.all_reduce(cpu)
        return Times(times.wall, cpu.tolist())

    silence_known_warnings()
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))  # [b, s]
    found = {}
    with distributed(run_with().parallel) as layout:
        with deepspeed_silenced(verbose=False):
            theirs = peer(build_module(run_with(), layout))
            for name, (flags, _) in WAYS.items():
                run = run_with(*flags)
                with distributed(run.parallel) as own_layout:
                    ways = {"suite": engine_step(run, own_layout, tokens, labels), "DDP": theirs}
                    times = alternate(ways, int(sys.argv[1]), settle=dist.barrier)
                found[name] = [asdict(of_all_ranks(each)) for each in times.values()]
        if layout.rank == 0:
            report(found)


main()
