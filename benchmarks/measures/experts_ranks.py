"""Run on each of two ranks by ``experts.py``: a step of expert parallelism, and what it consists of, in alternation.

Tokens go to the experts in turn, whatever the router says, so that no rank has more to do than another.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import repeat
from unittest.mock import patch

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Report the seconds of each."""
    prepare_environment(os.environ)

    import torch
    import torch.distributed as dist
    from torch import Tensor

    from benchmarks.comparing import alternate
    from benchmarks.measures.experts import OF_A_RANK, RANKS, SHAPE, ExpertShape
    from benchmarks.measures.peers import WithWeights, plain_step
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import engine_step, run_of
    from megatron.config import RunConfig
    from megatron.engines import deepspeed_silenced, silence_known_warnings
    from megatron.engines.build import build_module
    from megatron.launch.distributed import distributed
    from megatron.model.router import Router

    forward = Router.forward

    def in_turn(self: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        weights, chosen, kept = forward(self, x)
        return weights, torch.arange(chosen.numel()).view_as(chosen) % self.experts, kept

    def run_with(shape: ExpertShape, *flags: str) -> RunConfig:
        return run_of(shape, *flags, "--global-batch-size", str(shape.batch * RANKS))

    def all_to_alls(group: dist.ProcessGroup) -> Callable[[], None]:
        """Those of a step: numbers of rows once for each layer, rows forth and back, forward and backward."""
        rows = torch.randn(SHAPE.rows, SHAPE.hidden)
        received, counts = torch.empty_like(rows), torch.ones(RANKS, SHAPE.experts // RANKS, dtype=torch.int64)
        sizes = [SHAPE.rows // RANKS] * RANKS

        def exchange() -> None:
            for _ in range(SHAPE.layers):
                dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
                for _ in range(4):
                    dist.all_to_all_single(received, rows, sizes, sizes, group=group)

        return exchange

    silence_known_warnings()
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))  # [b, s]
    run, run_alone = run_with(SHAPE, "--expert-model-parallel-size", str(RANKS)), run_with(OF_A_RANK)
    with distributed(run.parallel) as layout, distributed(run_alone.parallel) as layout_alone:
        with deepspeed_silenced(verbose=False), patch.object(Router, "forward", in_turn):
            alone = build_module(run_alone, layout_alone)
            # Experts have no copies whose gradients would have to be summed.
            others = sum(weight.numel() for name, weight in alone.named_parameters() if ".experts." not in name)
            gradients = torch.zeros(others)
            ways: dict[str, Callable] = {
                "EP": engine_step(run, layout, tokens, labels),
                "no communication": plain_step(WithWeights(alone, labels), repeat((tokens, labels))),
                "all-to-alls": all_to_alls(layout.expert_group),
                "all-reduce": lambda: dist.all_reduce(gradients, group=layout.data_group),
            }
            times = alternate(ways, int(sys.argv[1]), warm_up=3, settle=dist.barrier)
        if layout.rank == 0:
            report({name: asdict(each) for name, each in times.items()})


main()
