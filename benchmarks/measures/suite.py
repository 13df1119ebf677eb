"""This project's side of the benchmarks: its engines, built from flags as in a run."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from benchmarks.measures.shapes import Shape
from megatron.config import RunConfig
from megatron.config.command_line import parse_run
from megatron.data.loader import Batch
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.training.engines import build_engine, train_batch


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
    engine = build_engine(run, layout)
    weights = torch.full_like(labels, 1 / labels.numel(), dtype=torch.float32)
    batches: Iterator[Batch] = repeat(Batch(tokens, (labels, weights)))
    return lambda: train_batch(engine, batches)
