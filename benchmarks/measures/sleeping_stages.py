"""Run on each rank by ``bubble.py``: a traced run of DeepSpeed's pipeline with stages that sleep."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron.launch.environment import prepare_environment

if TYPE_CHECKING:
    from torch import Tensor, nn

FIRST = 2
"""Iteration that is the first to be traced; those before it warm up."""


def main() -> None:
    """Train on this rank, as the JSON on the command line says."""
    settings = json.loads(sys.argv[1])
    prepare_environment(os.environ)

    # Imported after the environment is prepared, which torch and DeepSpeed read.
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch.nn.functional import mse_loss

    from benchmarks.measures.ranks import report
    from megatron.config.command_line import parse_run
    from megatron.launch.distributed import distributed
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings
    from megatron.tools.reporting.tracing import Tracer
    from megatron.training.engines import train_batch

    silence_known_warnings()
    last = FIRST + settings["iterations"] - 1
    run = parse_run(_arguments(settings, last), os.environ)
    stage = sleeping_stage(settings["forward"], settings["backward"])
    with distributed(run.parallel) as layout:
        with deepspeed_silenced(verbose=False):
            layers = [LayerSpec(stage) for _ in range(settings["stages"])]
            module = PipelineModule(layers, topology=layout.topology, loss_fn=mse_loss, partition_method="uniform")
            engine, *_ = deepspeed.initialize(
                model=module, model_parameters=module.parameters(), config=dict(run.ds_config)
            )
            tracer, data = Tracer(run, layout, module), batches()
            for number in range(1, last + 1):
                with tracer.around_iteration(number) as hooks:
                    train_batch(engine, data, hooks)
        if layout.rank == 0:
            report(last)


def _arguments(settings: Mapping[str, Any], last: int) -> list[str]:
    """The command line of a run of ``last`` iterations."""
    stages = settings["stages"]
    return (
        f"--num-layers {stages} --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 0.1 --batch-size 1 "
        f"--train-iters {last} --data-path none --vocab-file none --merge-file none --pipe-parallel-size {stages} "
        f"--gas {settings['micro_batches']} --trace {settings['folder']} --trace-steps {FIRST}:{last}"
    ).split()


def sleeping_stage(forward_seconds: float, backward_seconds: float) -> "type[nn.Module]":
    """A pipeline stage with one parameter, [8], whose passes sleep."""
    import torch
    from torch import Tensor, nn

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            time.sleep(forward_seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            time.sleep(backward_seconds)
            return grad

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.scale)

    return Stage


def batches() -> "Iterator[tuple[Tensor, Tensor]]":
    """Inputs and targets [1, 8], without end."""
    import torch

    while True:
        yield torch.ones(1, 8), torch.ones(1, 8)


main()
