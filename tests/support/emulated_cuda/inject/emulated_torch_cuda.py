"""What torch.cuda answers where ``device.cpp`` is the device: devices, memory, random states, streams and events.

Operations are finished when they return: streams and events order what is in order already.
"""

import os
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NAME = "emulated GPU"
CAPABILITY = (9, 0)
"""As of a device that has bf16."""


class Event:
    """A point in time."""

    def __init__(self, *_: Any, **__: Any):
        self.time = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self.time = time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds until ``later``."""
        return 1000 * (later.time - self.time)

    def query(self) -> bool:
        """Whether everything before it is finished."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class Stream:
    """A queue of operations, always empty; also a context."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any):
        self.device = torch.device("cuda", torch.cuda.current_device())

    def record_event(self, event: Event | None = None) -> Event:
        """An event now."""
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        """Whether it is empty."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Event) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class TensorType:
    """``torch.cuda.FloatTensor`` and the like, which a torch without CUDA has no use for."""

    def __init__(self, of_host: Any):
        self._of_host = of_host

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        """A tensor on the device, of what the type of the host takes."""
        return self._of_host(*arguments, **options).cuda()

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == self._of_host.dtype


class Generator:
    """The device's generator of random numbers, of which torch's own class would need CUDA."""

    def get_state(self) -> Tensor:
        """Its state: 16 bytes."""
        return torch.ops.emulated_cuda.random_state()

    def set_state(self, state: Tensor) -> None:
        """Continue from ``state``."""
        torch.ops.emulated_cuda.set_random_state(state)


def install() -> None:
    """Replace the functions of torch.cuda that would call CUDA."""
    device = torch.ops.emulated_cuda

    def nothing(*_: Any, **__: Any) -> None: ...

    def set_device(place: Any) -> None:
        index = place if isinstance(place, int) else torch.device(place).index
        device.set_device(-1 if index is None else index)

    def seed(value: int) -> None:
        device.seed(int(value) & (2**63 - 1))

    def initial_seed() -> int:
        return int(device.random_state()[:8].view(torch.int64))

    def memory_stats(place: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": device.allocated(), "allocated_bytes.all.peak": device.peak()}

    def properties(place: Any = None) -> SimpleNamespace:
        major, minor = CAPABILITY
        return SimpleNamespace(
            name=NAME, major=major, minor=minor, total_memory=_total_memory(), multi_processor_count=1,
            gcnArchName="", warp_size=32,
        )  # fmt: skip

    allocated = lambda place=None: device.allocated()  # noqa: E731
    peak = lambda place=None: device.peak()  # noqa: E731
    reset_peak = lambda place=None: device.reset_peak()  # noqa: E731
    replaced: dict[str, Any] = {
        "_lazy_init": nothing, "init": nothing, "_lazy_call": lambda callback, **_: callback(),
        "is_initialized": lambda: True, "is_available": lambda: True, "device_count": device.device_count,
        "current_device": device.current_device, "set_device": set_device, "synchronize": nothing,
        "get_device_name": lambda place=None: NAME, "get_device_capability": lambda place=None: CAPABILITY,
        "get_device_properties": properties, "is_bf16_supported": lambda *_, **__: True,
        "get_rng_state": lambda place=None: device.random_state(),
        "set_rng_state": lambda state, place=None: device.set_random_state(state),
        "manual_seed": seed, "manual_seed_all": seed, "initial_seed": initial_seed,
        "default_generators": defaultdict(Generator), "Stream": Stream, "Event": Event,
        "stream": lambda stream: stream or Stream(), "current_stream": lambda place=None: Stream(),
        "default_stream": lambda place=None: Stream(), "is_current_stream_capturing": lambda: False,
        "memory_allocated": allocated, "memory_reserved": allocated, "memory_cached": allocated,
        "max_memory_allocated": peak, "max_memory_reserved": peak, "max_memory_cached": peak,
        "reset_peak_memory_stats": reset_peak, "reset_max_memory_allocated": reset_peak,
        "reset_max_memory_cached": reset_peak, "memory_stats": memory_stats, "empty_cache": nothing,
        "mem_get_info": lambda place=None: (_total_memory() - device.allocated(), _total_memory()),
    }  # fmt: skip
    for kind in ("Bool", "Byte", "Double", "Float", "Half", "Int", "Long"):
        replaced[f"{kind}Tensor"] = TensorType(getattr(torch, f"{kind}Tensor"))
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = nothing
    torch.cuda.memory._record_memory_history = nothing
    torch.cuda.memory._snapshot = lambda *_, **__: {"segments": [], "device_traces": []}
    torch.Tensor.record_stream = nothing
    torch.Tensor.pin_memory = lambda tensor, place=None: tensor


def _total_memory() -> int:
    """Bytes of the device, as ``device.cpp`` has them."""

    return int(os.environ.get("EMULATED_CUDA_MEMORY", 80 << 30))
