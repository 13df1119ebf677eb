"""Memory of a rank: live tensors of each kind, and the peak of a step.

On a GPU its allocator knows the peak. On the CPU torch's profiler sees every allocation, and not the resident memory,
of which the C library keeps some back.
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
    """Bytes of weights, gradients and optimizer, wherever DeepSpeed keeps them."""
    return {kind: sum(storages(tensors).values()) for kind, tensors in tensors_by_kind(engine).items()}


def tensors_by_kind(engine: DeepSpeedEngine) -> dict[str, list[Tensor]]:
    """The tensors that hold weights, gradients and optimizer."""
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
    stepped_itself = storages(weights).keys()
    optimizer = [t for t in moments + own if address(t) not in stepped_itself]
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def is_between_micro_batches(engine: DeepSpeedEngine, instruction: Instruction) -> bool:
    """Whether gradients have been summed up and not been reduced; of one micro-batch, whether the step comes next."""
    if isinstance(engine, PipelineEngine) or engine.gradient_accumulation_steps() == 1:
        return instruction.name in ("ReduceGrads", "OptimizerStep")
    return instruction == Instruction("LoadMicroBatch", 2)


@contextmanager
def measured_peak() -> Iterator[list[int]]:
    """The most bytes that are live while inside, in a list that is filled at the end."""
    found: list[int] = []
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.synchronize()
        accelerator.reset_peak_memory_stats()
        yield found
        accelerator.synchronize()
        found.append(accelerator.max_memory_allocated())
        return
    before = sum(storages(live_tensors()).values())
    with memory_profile() as profiler:
        yield found
    found.append(before + highest_level(profiler))


@contextmanager
def before_measured_peak() -> Iterator[None]:
    """What is allocated while inside may be freed during ``measured_peak``: the profiler sees no other tensor go."""
    with memory_profile() if get_accelerator().device_name() == "cpu" else nullcontext():
        yield


def memory_profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def highest_level(profiler: profile) -> int:
    """By how many bytes the memory of a profile goes above where it began."""
    level = highest = 0
    sizes: dict[int, int] = {}
    for _, address, change in sorted(_allocations(profiler)):
        if change > 0:  # the thread of a collective, which no profile sees, has freed what was there
            level -= sizes.pop(address, 0)
            sizes[address] = change
        else:
            sizes.pop(address, None)
        level += change
        highest = max(highest, level)
    return highest


def _allocations(profiler: profile) -> Iterator[tuple[int, int, int]]:
    """Time, address and bytes of each; what is freed is negative."""
    results: Any = profiler.profiler
    for event in results.kineto_results.experimental_event_tree():
        yield from _of_event(event)


def _of_event(event: Any) -> Iterator[tuple[int, int, int]]:
    if event.tag.name == "Allocation":
        yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
    for child in event.children:
        yield from _of_event(child)


def live_tensors() -> list[Tensor]:
    """Every tensor in host memory that Python knows; not the fake ones that torch's compiler keeps."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)]


def real_bytes() -> int:
    """Bytes of tensors that are real where those of the device are fake; 0 if the device is not the CPU."""
    if get_accelerator().device_name() != "cpu":
        return 0
    return sum(storages(tensor for tensor in live_tensors() if not isinstance(tensor, FakeTensor)).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage that tensors are in, by its address."""
    return {address(tensor): size for tensor in tensors if (size := tensor.untyped_storage().nbytes())}


def address(tensor: Tensor) -> int:
    """Of its storage; a fake one has no memory."""
    storage = tensor.untyped_storage()
    return storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
