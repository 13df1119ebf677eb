"""Run on each rank by ``bubble.py``: traced runs of pipeline schedules with stages that sleep."""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Any

from megatron.common.processes import exit_with_parent
from megatron.launch.environment import prepare_environment

if TYPE_CHECKING:
    from torch import Tensor, nn

FIRST = 4
"""Iteration that is the first to sleep and to be traced; those before it warm up, and after the
very first show what the engine itself takes."""


def main() -> None:
    """Train each pipeline on this rank, as the JSON on the command line says, in a fork of this process."""
    settings = json.loads(sys.argv[1])
    prepare_environment(os.environ)

    # Imported after the environment is prepared, which torch and DeepSpeed read, and once for all forks.
    import deepspeed.pipe  # noqa: F401

    import megatron.engines.build  # noqa: F401
    from benchmarks.measures.ranks import report

    context = multiprocessing.get_context("fork")
    seconds = []
    for pipeline in settings["pipelines"]:
        queue = context.SimpleQueue()
        process = context.Process(target=train, args=({**settings, **pipeline}, queue))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)
        seconds.append(queue.get())
    if int(os.environ["RANK"]) == 0:
        report(seconds)


def train(settings: Mapping[str, Any], queue: "SimpleQueue[float]") -> None:
    """Train a pipeline, and trace the iterations that sleep. Hands over the seconds of one that does not."""
    exit_with_parent()
    import deepspeed
    from deepspeed.pipe import LayerSpec
    from torch.nn.functional import mse_loss

    from megatron.cli import parse_run
    from megatron.engines import deepspeed_silenced, silence_known_warnings
    from megatron.engines.build import our_engines
    from megatron.engines.engine import train_batch
    from megatron.engines.pipelined_model import PipelinedModel
    from megatron.launch.distributed import distributed
    from megatron.parallel.pipeline.schedule import schedule_of
    from megatron.tools.reporting.tracing import Tracer

    silence_known_warnings()
    # A store of its own: torchrun's has the keys of the pipeline before.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(settings["port"])
    last = FIRST + settings["iterations"] - 1
    run = parse_run(_arguments(settings, last), os.environ)
    chunks = run.parallel.model_chunks
    sleep = PassSeconds(0.0, 0.0)
    with distributed(run.parallel) as layout, deepspeed_silenced(verbose=False):
        parts = [LayerSpec(sleeping_chunk(sleep))] * chunks, mse_loss, run.activation, layout
        boundaries = range(chunks + 1)
        module = PipelinedModel(*parts, partition_boundaries=boundaries, schedule=schedule_of(run))
        with our_engines(run, layout):
            engine, *_ = deepspeed.initialize(
                model=module, model_parameters=module.parameters(), config=dict(run.ds_config)
            )
        tracer, data, seconds = Tracer(run, layout, module), batches(), []
        for number in range(1, last + 1):
            if number == FIRST:
                each = run.parallel.chunks_per_stage
                sleep.forward, sleep.backward = settings["forward"] / each, settings["backward"] / each
            begin = time.perf_counter()
            with tracer.around_iteration(number) as hooks:
                train_batch(engine, data, hooks)
            seconds.append(time.perf_counter() - begin)
    queue.put(min(seconds[1 : FIRST - 1]))


@dataclass
class PassSeconds:
    """How long a pass through a chunk sleeps."""

    forward: float
    backward: float
    """Half of it for the weight."""


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


def sleeping_chunk(seconds: PassSeconds) -> "type[nn.Module]":
    """A model chunk with one parameter, [8], whose passes sleep."""
    import torch
    from torch import Tensor, nn

    from megatron.parallel.tensor.deferred import DeferringModule

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor, module: DeferringModule) -> Tensor:
            time.sleep(seconds.forward)
            ctx.save_for_backward(weight)
            ctx.module = module
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
            (weight,) = ctx.saved_tensors
            time.sleep(seconds.backward / 2)
            sleep = partial(time.sleep, seconds.backward / 2)
            if not ctx.module.defer(sleep, weight):
                sleep()
            return grad, None, None

    class Chunk(DeferringModule):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return Sleep.apply(x * self.scale, self.scale, self)

    return Chunk


def batches() -> "Iterator[tuple[Tensor, Tensor]]":
    """Inputs and targets [1, 8], without end."""
    import torch

    while True:
        yield torch.ones(1, 8), torch.ones(1, 8)


main()
