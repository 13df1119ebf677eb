"""Run on each rank by ``bubble.py``: a traced run of a pipeline schedule with stages that sleep."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
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
    from deepspeed.pipe import LayerSpec
    from torch.nn.functional import mse_loss

    from benchmarks.measures.ranks import report
    from megatron.config.command_line import parse_run
    from megatron.launch.distributed import distributed
    from megatron.model.containers import ChunkedModel, DualPipeVModel, PipelinedModel
    from megatron.parallel.deepspeed_compat import deepspeed_silenced, silence_known_warnings
    from megatron.parallel.deepspeed_compat.schedules import scheduled_pipeline_engine
    from megatron.parallel.pipeline.schedule import schedule_of
    from megatron.tools.reporting.tracing import Tracer
    from megatron.training.engines import train_batch

    silence_known_warnings()
    last = FIRST + settings["iterations"] - 1
    run = parse_run(_arguments(settings, last), os.environ)
    chunks = run.parallel.model_chunks
    chunk = sleeping_chunk(*(settings[kind] / run.parallel.chunks_per_stage for kind in ("forward", "backward")))
    with distributed(run.parallel) as layout:
        with deepspeed_silenced(verbose=False):
            parts = [LayerSpec(chunk)] * chunks, mse_loss, run.activation, layout
            boundaries, is_ours = range(chunks + 1), run.parallel.uses_scheduled_engine
            if is_ours:
                module = ChunkedModel(*parts, partition_boundaries=boundaries, schedule=schedule_of(run))
            else:
                container = DualPipeVModel if run.parallel.uses_dualpipev else PipelinedModel
                module = container(*parts, partition_boundaries=boundaries)
            with scheduled_pipeline_engine() if is_ours else nullcontext():
                engine, *_ = deepspeed.initialize(
                    model=module, model_parameters=module.parameters(), config=dict(run.ds_config)
                )
            engine.routers = []  # as ``build_engine`` says of a model without experts
            tracer, data = Tracer(run, layout, module), batches()
            for number in range(1, last + 1):
                with tracer.around_iteration(number) as hooks:
                    train_batch(engine, data, hooks)
        if layout.rank == 0:
            report(last)


def _arguments(settings: Mapping[str, Any], last: int) -> list[str]:
    """The command line of a run of ``last`` iterations."""
    stages, chunks = settings["stages"], settings["stages"] * settings["chunks"]
    virtual = f"--num-virtual-stages-per-pipeline-rank {settings['chunks']} "
    return (
        f"--num-layers {chunks} --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 0.1 --batch-size 1 "
        f"--train-iters {last} --data-path none --vocab-file none --merge-file none --pipe-parallel-size {stages} "
        f"--pipeline-schedule {settings['schedule']} {virtual if settings['schedule'] == 'interleaved' else ''}"
        f"--gas {settings['micro_batches']} --trace {settings['folder']} --trace-steps {FIRST}:{last}"
    ).split()


def sleeping_chunk(forward_seconds: float, backward_seconds: float) -> "type[nn.Module]":
    """A model chunk with one parameter, [8], whose passes sleep, half of the backward pass for the weight."""
    import torch
    from torch import Tensor, nn

    from megatron.parallel.tensor.deferred import open_products

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
            time.sleep(forward_seconds)
            ctx.save_for_backward(weight)
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            (weight,) = ctx.saved_tensors
            time.sleep(backward_seconds / 2)
            if deferred := open_products(weight):
                deferred.add(lambda: time.sleep(backward_seconds / 2), weight)
            else:
                time.sleep(backward_seconds / 2)
            return grad, None

    class Chunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.scale, self.scale)

    return Chunk


def batches() -> "Iterator[tuple[Tensor, Tensor]]":
    """Inputs and targets [1, 8], without end."""
    import torch

    while True:
        yield torch.ones(1, 8), torch.ones(1, 8)


main()
