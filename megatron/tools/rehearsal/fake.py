"""Runs the unmodified training program with torch's FakeTensor on the device: no memory, no computation.

On a GPU, real or emulated, device tensors are fake and host tensors real. On the CPU all new tensors are fake except
for small integer tensors and byte tensors, such as samples and states of random number generators. A program that
reads a fake tensor on the host gets 0.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import utils as zero_utils
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatron.engines import build
from megatron.tools.one_rank import patched
from megatron.tools.one_rank.data_dependent import has_data_dependent_shape, result_for_all_elements

aten = torch.ops.aten
HOST_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: lambda x: 0.0 if x.dtype.is_floating_point else 0,
    aten.is_nonzero.default: lambda x: False,
    aten.equal.default: lambda x, y: True,
}
"""Operations that return a number to the host, and the number: no signal has arrived, no gradient is infinite."""
_SMALL = 4096
"""Maximum number of elements of a real integer tensor on the CPU."""


class FakeDevice(TorchDispatchMode):
    """Dispatch mode that makes device tensors fake; ``level`` and ``highest`` are their current and peak bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._kind = get_accelerator().device_name()
        self._known: dict[int, Any] = {}
        self.level = self.highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func.namespace == "prim" or not (is_fake or self._creates_on_device(func, args, kwargs, tensors)):
            return func(*args, **kwargs)
        if is_fake and func in HOST_VALUES:
            return HOST_VALUES[func](*args)
        if is_fake and has_data_dependent_shape(func, args):
            with self._fake:
                return tree_map(self._count, result_for_all_elements(func, *args, **kwargs))
        if (copied := self._copy(func, args, kwargs)) is not None:
            return self._count(copied)
        with self._fake:
            result = func(*args, **kwargs)
        return tree_map(self._real_on_host, result)

    def _creates_on_device(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> bool:
        """Whether an operation without fake arguments creates tensors on the device."""
        device = kwargs.get("device")
        if self._kind != "cpu":
            return device is not None and torch.device(device).type == self._kind
        if tensors or not func._schema.returns:
            return False
        with self._fake:
            created = func(*args, **{**kwargs, "generator": None} if "generator" in kwargs else kwargs)
        if not isinstance(created, Tensor) or created.dtype == torch.uint8:
            return False
        return created.dtype.is_floating_point or created.numel() > _SMALL

    def _copy(self, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
        """The result of a copy between host and device; None if ``func`` is another operation."""
        if func is aten.copy_.default and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            return args[0].zero_() if args[0].is_cpu else None
        if func is aten.copy_.default and isinstance(args[0], FakeTensor) and not isinstance(args[1], FakeTensor):
            return args[0]
        if self._kind != "cpu" and func is aten._to_copy.default and "device" in kwargs and args[0].is_cpu:
            with self._fake:
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty_strided(args[0].size(), args[0].stride(), dtype=dtype, device=kwargs["device"])
        return None

    def _real_on_host(self, value: Any) -> Any:
        """``value``; a fake host tensor is replaced by a real one of zeros."""
        if isinstance(value, FakeTensor) and value.is_cpu and self._kind != "cpu":
            return torch.zeros(value.shape, dtype=value.dtype)
        return self._count(value)

    def _count(self, value: Any) -> Any:
        """Count the memory of a device tensor until its storage is freed. Returns ``value``."""
        if isinstance(value, FakeTensor) and value.device.type == self._kind:
            storage = value.untyped_storage()
            address = storage._cdata
            if address not in self._known:
                size = storage.nbytes()
                self._known[address] = weakref.finalize(storage, self._free, address, size)
                self.level += size
                self.highest = max(self.highest, self.level)
        return value

    def _free(self, address: int, size: int) -> None:
        del self._known[address]
        self.level -= size


def apply_in_place(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` that changes fake parameters in place, so that they remain the same objects."""
    for child in module.children():
        child._apply(function)
    for parameter in [parameter for parameter in module._parameters.values() if parameter is not None]:
        with torch.no_grad():
            moved = function(parameter)
        assert isinstance(parameter, FakeTensor) and isinstance(moved, FakeTensor), (module, parameter.shape)
        parameter.data, parameter.fake_device = moved, moved.device
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Context in which tensors on the device are fake."""
    build_module = build.build_module

    def build_on_device(*arguments: Any) -> nn.Module:
        with torch.device(get_accelerator().current_device_name()):  # a real parameter cannot become fake later
            return build_module(*arguments)

    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(.., device=..) goes through the dispatcher
    try:
        with (
            patched(
                (nn.Module, "_apply", apply_in_place),
                (build, "build_module", build_on_device),
                (zero_utils, "assert_lst_len_same_as_other_ranks", lambda values: None),  # it would read zeros
                (zero_utils, "get_lst_from_rank0", lambda values: values),
            ),
            FakeDevice() as device,
        ):
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
