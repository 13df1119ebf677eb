"""This project's side of the benchmarks: its engines, built from flags as in a run, and DeepSpeed's without it."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor

from benchmarks.measures.shapes import CLIP, LEARNING_RATE, WEIGHT_DECAY, Shape
from megatron.cli import parse_run
from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.build import build_engine, build_module
from megatron.engines.engine import train_batch
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.training.learning_rates import annealing_lr


def run_of(shape: Shape, *flags: str, micro_batches: int = 1) -> RunConfig:
    """The run that trains a model of that shape without dropout, by these further flags."""
    words = [*shape.words, *"--train-iters 1000 --data-path none --vocab-file none --merge-file none".split()]
    if "--global-batch-size" not in flags:
        words += ["--gas", str(micro_batches)]
    run = parse_run([*words, *flags], os.environ)
    return replace(run, model=replace(run.model, vocab_size=shape.vocabulary, padded_vocab_size=shape.vocabulary))


def engine_step(run: RunConfig, layout: ParallelLayout, tokens: Tensor, labels: Tensor) -> Callable[[], Any]:
    """One step of the run's engine, over the same micro-batch again and again: tokens and labels [b, s]."""
    model_parallel_manual_seed(1, layout)
    engine = build_engine(run, layout, annealing_lr(run))
    weights = torch.full_like(labels, 1 / labels.numel(), dtype=torch.float32)
    batches: Iterator[Batch] = repeat(Batch(tokens, (labels, weights)))
    return lambda: train_batch(engine, batches)


def bare_step(run: RunConfig, layout: ParallelLayout, tokens: Tensor, labels: Tensor) -> Callable[[], Any]:
    """A step of the same engine over the same model, in a script that knows nothing but DeepSpeed, over gloo."""
    adam = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "torch_adam": True, "fused": True}
    if not run.parallel.uses_pipeline:
        layout = replace(layout, data_group=dist.group.WORLD)
    module, micro_batches = build_module(run, layout), run.train.gradient_accumulation_steps
    groups._WORLD_GROUP = None  # DeepSpeed's copy may be one of ranks that have parted since
    with patch.object(deepspeed.comm.comm.cdb, "new_group", dist.new_group), patch.object(groups, "mpu", None):
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=module.parameters(),
            mpu=None,
            config={
                "train_micro_batch_size_per_gpu": run.train.micro_batch_size,
                "gradient_accumulation_steps": micro_batches,
                "gradient_clipping": CLIP,
                "zero_optimization": {"stage": run.zero.zero_stage},
                "optimizer": {"type": "AdamW", "params": adam},
            },
        )
    targets = labels, torch.full(labels.shape, 1 / labels.numel())
    if run.parallel.uses_pipeline:
        return lambda: engine.train_batch(repeat((tokens, targets)))

    def step() -> None:
        for _ in range(micro_batches):
            engine.backward(engine(tokens, targets))
            engine.step()

    def step_reduced_once() -> None:
        with engine.coalesce_grad_reduction():
            for _ in range(micro_batches):
                engine.backward(engine(tokens, targets))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()

    return step_reduced_once if run.coalesces_grad_reduction else step
