"""DeepSpeed accelerator, and torch stream, event and generator, of the device without memory: see ``memoryless``."""

from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor

DEVICE = "meta"


class _Event:
    def __init__(self, *_: Any, **__: Any): ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Stream(_Event):
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()


class MemorylessAccelerator(CPU_Accelerator):
    """An asynchronous device, like a GPU."""

    Stream, Event = _Stream, _Event

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: Any = None) -> str:
        return DEVICE

    def current_device_name(self) -> str:
        return DEVICE

    def is_fp16_supported(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "nccl"

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def current_stream(self, device_index: Any = None) -> _Stream:
        return _Stream()

    default_stream = current_stream


_GENERATOR = torch.Generator


class _GeneratorType(type):
    def __call__(cls, device: Any = "cpu") -> Any:
        return _GENERATOR("cpu" if torch.device(device).type == DEVICE else device)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class AnyGenerator(metaclass=_GeneratorType):
    """Replacement of ``torch.Generator`` that also accepts this device, where no random numbers are drawn."""
