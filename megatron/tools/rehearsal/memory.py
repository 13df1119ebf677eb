"""Measures the memory of a rank: weights, gradients, optimizer state, and the peak of a step.

On a GPU the caching allocator knows the peak. On the CPU torch's profiler records every allocation; resident memory
would include memory that the C library has not returned.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from megatron.parallel.pipeline.schedule import Instruction


def held_by_kind(engine: DeepSpeedEngine) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state, at any ZeRO stage."""
    return {kind: sum(storages(tensors).values()) for kind, tensors in tensors_by_kind(engine).items()}


def tensors_by_kind(engine: DeepSpeedEngine) -> dict[str, list[Tensor]]:
    """The tensors of weights, gradients and optimizer state."""
    parameters, wrapper = list(engine.module.parameters()), engine.optimizer
    inner = getattr(wrapper, "optimizer", wrapper)
    weights = [p.data for p in parameters] + [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    moments = [t for state in inner.state.values() for t in state.values() if torch.is_tensor(t)]
    own = [p.data for group in inner.param_groups for p in group["params"]]
    own += getattr(wrapper, "fp32_partitioned_groups_flat", [])
    gradients = [p.grad for p in parameters if p.grad is not None]
    for name in ("all_grad_tensors", "averaged_gradients"):  # ZeRO 2
        gradients += [t for kept in getattr(wrapper, name, {}).values() if kept for t in kept]
    if buckets := getattr(wrapper, "gradients", None):
        gradients += [bucket._flat for bucket in buckets._buckets if bucket._flat is not None]
    if hasattr(wrapper, "grad_partitions_flat_buffer"):  # ZeRO 3
        gradients.append(wrapper.grad_partitions_flat_buffer)
    weight_storages = storages(weights).keys()  # without master weights the optimizer updates these
    optimizer = [t for t in moments + own if address(t) not in weight_storages]
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def is_between_micro_batches(engine: DeepSpeedEngine, instruction: Instruction) -> bool:
    """Whether ``instruction`` begins when gradients have been accumulated, but not reduced yet.

    With one micro-batch: whether reduction or the optimizer step begins.
    """
    if isinstance(engine, PipelineEngine) or engine.gradient_accumulation_steps() == 1:
        return instruction.name in ("ReduceGrads", "OptimizerStep")
    return instruction == Instruction("LoadMicroBatch", 2)


@contextmanager
def measured_peak() -> Iterator[list[int]]:
    """Context that yields a list, which gets the peak of live bytes at its end."""
    peak: list[int] = []
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.synchronize()
        accelerator.reset_peak_memory_stats()
        yield peak
        accelerator.synchronize()
        peak.append(accelerator.max_memory_allocated())
        return
    before = sum(storages(live_tensors()).values())
    with memory_profile() as profiler:
        yield peak
    peak.append(before + highest_level(profiler))


@contextmanager
def before_measured_peak() -> Iterator[None]:
    """Context around code whose allocations are freed in a later ``measured_peak``.

    The profiler records a free only if it has recorded the allocation.
    """
    with memory_profile() if get_accelerator().device_name() == "cpu" else nullcontext():
        yield


def memory_profile() -> profile:
    """A torch profiler of CPU allocations."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def highest_level(profiler: profile) -> int:
    """Peak bytes of a memory profile, above the bytes at its start."""
    level = highest = 0
    sizes: dict[int, int] = {}
    for _, address, change in sorted(_allocations(profiler)):
        if change > 0:  # an earlier tensor at this address was freed by a collective's thread, which is not profiled
            level -= sizes.pop(address, 0)
            sizes[address] = change
        else:
            sizes.pop(address, None)
        level += change
        highest = max(highest, level)
    return highest


def _allocations(profiler: profile) -> Iterator[tuple[int, int, int]]:
    """(time, address, bytes) of each allocation; bytes are negative when memory is freed."""
    results: Any = profiler.profiler
    for event in results.kineto_results.experimental_event_tree():
        yield from _allocations_in(event)


def _allocations_in(event: Any) -> Iterator[tuple[int, int, int]]:
    if event.tag.name == "Allocation":
        yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
    for child in event.children:
        yield from _allocations_in(child)


def live_tensors() -> list[Tensor]:
    """All real tensors in host memory, found through Python's garbage collector."""
    gc.collect()
    tensors = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor))
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)]


def real_bytes() -> int:
    """Bytes of tensors that remain real with a fake CPU device; 0 if the device is not the CPU."""
    if get_accelerator().device_name() != "cpu":
        return 0
    return sum(storages(tensor for tensor in live_tensors() if not isinstance(tensor, FakeTensor)).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage of ``tensors``, by address."""
    return {address(tensor): size for tensor in tensors if (size := tensor.untyped_storage().nbytes())}


def address(tensor: Tensor) -> int:
    """A unique number of the storage of ``tensor``; a fake tensor has no data pointer."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
