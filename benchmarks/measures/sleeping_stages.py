"""Run on each rank by ``bubble.py``: a traced run of DeepSpeed's pipeline with stages that sleep."""

import json
import os
import sys
import time
from collections.abc import Iterator

from megatron.launch.environment import prepare_environment

FIRST = 2
"""Iteration that is the first to be traced; those before it warm up."""


def main() -> None:
    """Train on this rank, as the JSON on the command line says."""
    settings = json.loads(sys.argv[1])
    stages, forward, backward = settings["stages"], settings["forward"], settings["backward"]
    last = FIRST + settings["iterations"] - 1
    words = (
        f"--num-layers {stages} --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 0.1 --batch-size 1 "
        f"--train-iters {last} --data-path none --vocab-file none --merge-file none --pipe-parallel-size {stages} "
        f"--gas {settings['micro_batches']} --trace {settings['folder']} --trace-steps {FIRST}:{last}"
    )
    prepare_environment(os.environ)

    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from torch import Tensor, nn

    from benchmarks.measures.ranks import report
    from megatron.config.command_line import parse_run
    from megatron.launch.distributed import distributed
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings
    from megatron.tools.reporting.tracing import Tracer
    from megatron.training.engines import train_batch

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            time.sleep(forward)
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            time.sleep(backward)
            return grad

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.scale)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(1, 8), torch.ones(1, 8)

    silence_known_warnings()
    run = parse_run(words.split(), os.environ)
    with distributed(run.parallel) as layout:
        with deepspeed_silenced(verbose=False):
            layers = [LayerSpec(Stage) for _ in range(stages)]
            loss = nn.functional.mse_loss
            module = PipelineModule(layers, topology=layout.topology, loss_fn=loss, partition_method="uniform")
            engine, *_ = deepspeed.initialize(
                model=module, model_parameters=module.parameters(), config=dict(run.ds_config)
            )
            tracer, data = Tracer(run, layout, module), batches()
            for number in range(1, last + 1):
                with tracer.around_iteration(number) as hooks:
                    train_batch(engine, data, hooks)
        if layout.rank == 0:
            report(last)


main()
