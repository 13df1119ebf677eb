"""What an engine holds in memory on this rank: live tensors of each kind, and the peak of a step.

Peaks come from torch's profiler, which sees every allocation, and not from resident memory, of which the C library
keeps some back.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.build import build_engine
from megatron.engines.engine import train_batch
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction
from megatron.parallel.tensor.random import model_parallel_manual_seed
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
    others = _live_tensors()  # held on to, so that no storage of the engine's gets the address of one of theirs
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
    moment = Instruction("ReduceGrads") if isinstance(engine, PipelineEngine) else Instruction("LoadMicroBatch", 2)

    @contextmanager
    def listen(instruction: Instruction) -> Iterator[None]:
        if instruction == moment:
            found.update({kind: sum(_storages(tensors).values()) for kind, tensors in _by_kind(engine).items()})
        yield

    train_batch(engine, batches, [listen])
    return found


def _by_kind(engine: DeepSpeedEngine) -> dict[str, list[Tensor]]:
    """The tensors that hold weights, gradients and optimizer, wherever DeepSpeed keeps them."""
    parameters, wrapper = list(engine.module.parameters()), engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    weights = [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    moments = [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t)]
    own = [p.data for group in inner.param_groups for p in group["params"]]
    own += getattr(wrapper, "fp32_partitioned_groups_flat", [])
    gradients = [p.grad for p in parameters if p.grad is not None]
    for name in ("all_grad_tensors", "averaged_gradients"):  # of ZeRO 2
        gradients += [t for kept in getattr(wrapper, name, {}).values() if kept for t in kept]
    if buckets := getattr(wrapper, "gradients", None):
        gradients += [bucket._flat for bucket in buckets._buckets if bucket._flat is not None]
    if hasattr(wrapper, "grad_partitions_flat_buffer"):  # of ZeRO 3
        gradients.append(wrapper.grad_partitions_flat_buffer)
    stepped_itself = _storages(weights).keys()
    optimizer = [t for t in moments + own if t.untyped_storage().data_ptr() not in stepped_itself]
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def _peak_of_a_step(engine: DeepSpeedEngine, batches: Iterator[Batch], others: list[Tensor], steps: int) -> int:
    """What is live before a step, without what was live before the engine, and by how much the step goes above."""
    known = _storages(others)
    before = sum(size for address, size in _storages(_live_tensors()).items() if address not in known)
    peaks = []
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train_batch(engine, batches)
        level = highest = 0
        for _, change in sorted(_allocations(profiler)):
            level += change
            highest = max(highest, level)
        peaks.append(highest)
    return before + min(peaks)


def _allocations(profiler: profile) -> Iterator[tuple[int, int]]:
    """Time and bytes of each; what is freed is negative."""
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.start_ns(), event.nbytes()


def _live_tensors() -> list[Tensor]:
    """Every tensor that Python knows."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.device.type == "cpu"]


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    """Bytes of each storage that tensors are in, by its address."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    found.pop(0, None)
    return found
