"""Tensors of the device without memory and computation: torch's FakeTensor, while the training program runs unmodified.

On a GPU, real or emulated, tensors of the device are fake and those of the host real. On the CPU all tensors that are
made are fake, but for small ones of whole numbers and bytes, such as samples and states of random number generators.
What a program reads of a fake tensor is 0.
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
ANSWERS: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: lambda x: 0.0 if x.dtype.is_floating_point else 0,
    aten.is_nonzero.default: lambda x: False,
    aten.equal.default: lambda x, y: True,
}
"""What needs a number on the host, and the number: no signal has arrived, no gradient is infinite."""
_SMALL = 4096
"""Elements of a tensor of whole numbers on the CPU that may be real."""


class FakeDevice(TorchDispatchMode):
    """While inside, tensors on the device are fake; ``level`` and ``highest`` are their bytes."""

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
        if func.namespace == "prim" or not (is_fake or self._is_made_here(func, args, kwargs, tensors)):
            return func(*args, **kwargs)
        if is_fake and func in ANSWERS:
            return ANSWERS[func](*args)
        if is_fake and has_data_dependent_shape(func, args):
            with self._fake:
                return tree_map(self._noted, result_for_all_elements(func, *args, **kwargs))
        if (moved := self._moved(func, args, kwargs)) is not None:
            return self._noted(moved)
        with self._fake:
            found = func(*args, **kwargs)
        return tree_map(self._settled, found)

    def _is_made_here(self, func: Any, args: tuple, kwargs: dict, tensors: list[Tensor]) -> bool:
        """Whether an operation on real tensors, or on none, makes tensors of the device."""
        device = kwargs.get("device")
        if self._kind != "cpu":
            return device is not None and torch.device(device).type == self._kind
        if tensors or not func._schema.returns:
            return False
        with self._fake:
            made = func(*args, **{**kwargs, "generator": None} if "generator" in kwargs else kwargs)
        if not isinstance(made, Tensor) or made.dtype == torch.uint8:
            return False
        return made.dtype.is_floating_point or made.numel() > _SMALL

    def _moved(self, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
        """The result of a copy between host and device that exists or can be allocated; None if ``func`` is none."""
        if func is aten.copy_.default and isinstance(args[1], FakeTensor) and not isinstance(args[0], FakeTensor):
            return args[0].zero_() if args[0].is_cpu else None
        if func is aten.copy_.default and isinstance(args[0], FakeTensor) and not isinstance(args[1], FakeTensor):
            return args[0]
        if self._kind != "cpu" and func is aten._to_copy.default and "device" in kwargs and args[0].is_cpu:
            with self._fake:
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty_strided(args[0].size(), args[0].stride(), dtype=dtype, device=kwargs["device"])
        return None

    def _settled(self, value: Any) -> Any:
        """A tensor of the host is real."""
        if isinstance(value, FakeTensor) and value.is_cpu and self._kind != "cpu":
            return torch.zeros(value.shape, dtype=value.dtype)
        return self._noted(value)

    def _noted(self, value: Any) -> Any:
        """Count the memory of a tensor, until its storage is freed."""
        if isinstance(value, FakeTensor) and value.device.type == self._kind:
            storage = value.untyped_storage()
            address = storage._cdata
            if address not in self._known:
                size = storage.nbytes()
                self._known[address] = weakref.finalize(storage, self._freed, address, size)
                self.level += size
                self.highest = max(self.highest, self.level)
        return value

    def _freed(self, address: int, size: int) -> None:
        del self._known[address]
        self.level -= size


def apply_in_place(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``; a fake parameter stays the object that it is."""
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
    """While inside, tensors on the device are fake."""
    build_module = build.build_module

    def build_on_device(*arguments: Any) -> nn.Module:
        with torch.device(get_accelerator().current_device_name()):  # a real weight could not become fake later
            return build_module(*arguments)

    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(.., device=..) by way of the dispatcher
    try:
        with (
            patched(
                (nn.Module, "_apply", apply_in_place),
                (build, "build_module", build_on_device),
                (zero_utils, "assert_lst_len_same_as_other_ranks", lambda values: None),  # on the device they are all 0
                (zero_utils, "get_lst_from_rank0", lambda values: values),
            ),
            FakeDevice() as device,
        ):
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
