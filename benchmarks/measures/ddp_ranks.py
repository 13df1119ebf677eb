"""Run on each of two ranks by ``ddp.py``: this project's engines, DeepSpeed's, torch's DDP and FSDP2 in alternation."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from unittest.mock import patch

from megatron.launch.environment import prepare_environment


def main() -> None:
    """Report wall-clock time, and CPU time of both ranks together, of each implementation."""
    prepare_environment(os.environ)

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.comparing import Times, alternate
    from benchmarks.measures.ddp import MICRO_BATCHES, OF_A_RANK, SHAPE, WAYS
    from benchmarks.measures.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, WithWeights
    from benchmarks.measures.ranks import report
    from benchmarks.measures.suite import bare_step, engine_step, run_of
    from megatron.config import RunConfig
    from megatron.launch.distributed import distributed
    from megatron.model.transformer import ParallelTransformerLayer
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings
    from megatron.parallel.layout import ParallelLayout
    from megatron.training.engines import build_module

    def run_with(*flags: str) -> RunConfig:
        return run_of(SHAPE, *flags, "--global-batch-size", str(MICRO_BATCHES))

    def step_of(model: nn.Module, before: Callable[[bool], object] = lambda is_last: None) -> Callable[[], None]:
        """A step of a plain loop over this rank's half of the micro-batches, each after ``before(is_last)``."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

        @patch.object(nn.functional, "linear", linear)
        def step() -> None:
            for number in range(1, OF_A_RANK + 1):
                with before(number == OF_A_RANK) or nullcontext():
                    (model(tokens, labels) / OF_A_RANK).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def ddp() -> Callable[[], None]:
        model = DistributedDataParallel(WithWeights(build_module(run_with(), layout), labels))
        return step_of(model, lambda is_last: None if is_last else model.no_sync())

    def fsdp(run: RunConfig) -> Callable[[], None]:
        """Layer by layer; weights sharded at ZeRO 3 alone between passes, and at both between steps."""
        model = WithWeights(build_module(run_with(), layout), labels)
        shards_weights, once = run.zero.zero_stage == 3, run.zero.zero_coalesce_grad_reduction
        settings = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": shards_weights}
        for layer in filter(lambda module: isinstance(module, ParallelTransformerLayer), model.modules()):
            fully_shard(layer, **settings)
        fully_shard(model, **settings)

        def before(is_last: bool) -> None:
            model.set_requires_gradient_sync(is_last or not once)
            model.set_reshard_after_backward(is_last or shards_weights)

        return step_of(model, before)

    def ways(run: RunConfig, own_layout: ParallelLayout) -> dict[str, Callable]:
        found = {
            "suite": engine_step(run, own_layout, tokens, labels),
            "DDP": of_ddp,
            "bare DeepSpeed": bare_step(run, own_layout, tokens, labels),
        }
        return found | limits | ({"FSDP2": fsdp(run)} if run.zero.zero_stage >= 2 else {})

    def collectives(group: dist.ProcessGroup | None, name: str = "") -> dict[str, Callable]:
        whole = torch.zeros(SHAPE.parameters // 2 * 2)
        part = torch.zeros(len(whole) // dist.get_world_size())
        return {
            f"{name}all-reduce": lambda: dist.all_reduce(whole, group=group),
            f"{name}reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            f"{name}all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        }

    def timed(ways: dict[str, Callable]) -> dict[str, dict[str, list[float]]]:
        times = alternate(ways, int(sys.argv[1]), settle=dist.barrier)
        return {name: asdict(of_all_ranks(each)) for name, each in times.items()}

    def of_all_ranks(times: Times) -> Times:
        """Barriers make the clock's seconds those of all; the processors' are added up."""
        cpu = torch.tensor(times.cpu)
        dist.all_reduce(cpu)
        return Times(times.wall, cpu.tolist())

    silence_known_warnings()
    linear = nn.functional.linear  # which DeepSpeed replaces once a model of ZeRO 3 is built
    tokens, labels = (torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence)) for _ in range(2))  # [b, s]
    found = {}
    with distributed(run_with().parallel) as layout:
        with deepspeed_silenced(verbose=False):
            of_ddp = ddp()
            alone = step_of(WithWeights(build_module(run_with(), layout), labels))
            limits = {"no communication": alone, **collectives(layout.data_group)}
            found["collectives"] = timed(limits | collectives(None, "gloo's "))
            for name, way in WAYS.items():
                run = run_with(*way.flags)
                with distributed(run.parallel) as own_layout:
                    found[name] = timed(ways(run, own_layout))
        if layout.rank == 0:
            report(found)


main()
