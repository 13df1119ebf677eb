"""What an engine holds in memory on this rank: live tensors of each kind, and the peak of a step.

Peaks come from torch's profiler, which sees every allocation, and not from resident memory, of which the C library
keeps some back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.build import build_engine
from megatron.engines.engine import train_batch
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction
from megatron.parallel.tensor.random import model_parallel_manual_seed
from megatron.tools.rehearsal.memory import (
    held_by_kind,
    highest_level,
    is_between_micro_batches,
    live_tensors,
    memory_profile,
    storages,
)
from megatron.training.learning_rates import annealing_lr

STEPS = 5


def measured_memory(
    run: RunConfig, layout: ParallelLayout, batches: Iterator[Batch], steps: int = STEPS
) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer between two micro-batches, and in total at the peak of a step.

    The peak is the least of so many steps: gloo's threads let go of a tensor when they next run, which may be late on a
    busy machine.
    """
    model_parallel_manual_seed(1, layout)
    others = live_tensors()  # held on to, so that no storage of the engine's gets the address of one of theirs
    engine = build_engine(run, layout, annealing_lr(run))
    train_batch(engine, batches)
    held = _between_micro_batches(engine, batches)
    total = _peak_of_a_step(engine, batches, others, steps)
    engine.destroy()
    deepspeed.checkpointing.reset()
    return {**held, "total": total}


def _between_micro_batches(engine: DeepSpeedEngine, batches: Iterator[Batch]) -> dict[str, int]:
    """Bytes of each kind when gradients have been summed up, but not yet reduced, in a second iteration."""
    found: dict[str, int] = {}

    @contextmanager
    def listen(instruction: Instruction) -> Iterator[None]:
        if not found and is_between_micro_batches(engine, instruction):
            found.update(held_by_kind(engine))
        yield

    train_batch(engine, batches, [listen])
    return found


def _peak_of_a_step(engine: DeepSpeedEngine, batches: Iterator[Batch], others: list[Tensor], steps: int) -> int:
    """What is live before a step, without what was live before the engine, and by how much the step goes above."""
    known = storages(others)
    before = sum(size for address, size in storages(live_tensors()).items() if address not in known)
    peaks = []
    for _ in range(steps):
        with memory_profile() as profiler:
            train_batch(engine, batches)
        peaks.append(highest_level(profiler))
    return before + min(peaks)
