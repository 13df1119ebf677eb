"""Started on each rank by ``long_sequences.py``: memory, what is planned, and the times of steps."""

import json
import os
import sys
import time

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Report, for each length, the highest of all ranks, and the seconds of each round."""
    prepare_environment(os.environ)

    from itertools import repeat

    import torch
    import torch.distributed as dist

    from benchmarks.measures.live_memory import measured_memory
    from benchmarks.measures.long_sequences import shape_of
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from megatron.data.loader import Batch
    from megatron.engines import deepspeed_silenced, silence_known_warnings
    from megatron.launch.distributed import distributed
    from megatron.parallel.layout import ParallelLayout
    from megatron.tools.planning.memory import stage_memory

    silence_known_warnings()
    (lengths, rounds), flags = json.loads(sys.argv[1]), sys.argv[2:]
    found = []

    def measured(tokens: int, layout: ParallelLayout) -> dict[str, float | list[float]]:
        shape = shape_of(tokens)
        run = run_of(shape, *flags)
        inputs, labels = torch.randint(shape.vocabulary, (2, shape.batch, tokens))  # [b, s] each
        step = engine_step(run, layout, inputs, labels)
        seconds = [_seconds(step) for _ in range(rounds + 1)][1:]
        del step
        batch = Batch(inputs, (labels, torch.full(labels.shape, 1 / labels.numel())))
        peak = measured_memory(run, layout, repeat(batch), steps=1)["total"]
        mine = torch.tensor([peak, stage_memory(run)[0].total, *seconds], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        peak, planned, *seconds = mine.tolist()
        return {"measured": peak, "planned": planned, "seconds": seconds}

    with distributed(run_of(shape_of(lengths[0]), *flags).parallel) as layout:
        for tokens in lengths:
            with deepspeed_silenced(verbose=False):
                found.append(measured(tokens, layout))
        if layout.rank == 0:
            report(found)


def _seconds(step) -> float:
    begin = time.process_time()
    step()
    return time.process_time() - begin


main()
