"""A device without memory: tensors have shapes and types, and nothing is computed.

It is torch's meta device in place of CUDA, with an own DeepSpeed accelerator. Values that the program reads on the host
are 1 for floating-point numbers, False for booleans and 0 for integers; operations with data-dependent shapes select
all elements. With ``nothing_counts`` they are 0 and True, and no element is selected, as for a batch whose loss mask is
zero; except for values that ranks have agreed on, which are computed from few reduced numbers.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.runtime.zero import utils as zero_utils
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import adagrad, adam, sgd
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.tools.one_rank import patched
from megatron.tools.one_rank.accelerator import DEVICE, AnyGenerator, MemorylessAccelerator
from megatron.tools.one_rank.data_dependent import SELECTING, has_data_dependent_shape, result_for_all_elements
from megatron.tools.one_rank.group import OneRankGroup

aten = torch.ops.aten
OperationHook = Callable[[Any, tuple, dict], None]
_LARGEST = 1024
"""Maximum number of elements of a tensor that is copied to the host to be read; larger ones stay on the device."""
_FEW = 8
"""Maximum number of elements of a tensor that ranks reduce to agree on something."""
_COPIES = (aten._to_copy.default, aten.empty_like.default)


class _Memoryless(TorchDispatchMode):
    """Runs operations on the device. Result shapes are cached, since torch computes them slowly, in Python."""

    def __init__(self, nothing_counts: bool, on_operation: OperationHook | None) -> None:
        super().__init__()
        self._on_operation = on_operation
        self._results: dict[Any, Any] = {}
        self._nothing_counts = nothing_counts
        self._agreed: dict[int, StorageWeakRef] = {}
        self._host_values: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._number,
            aten.is_nonzero.default: self._is_extreme,
            aten.equal.default: lambda x, y: True,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check would take as long as an operation

    def _number(self, x: Tensor) -> Any:
        if x.dtype.is_floating_point:
            return float(not self._is_extreme(x))
        return self._is_extreme(x) if x.dtype == torch.bool else 0

    def _is_extreme(self, x: Tensor) -> bool:
        return self._nothing_counts and x.untyped_storage()._cdata not in self._agreed

    def agree_on(self, tensors: Iterable[Any]) -> None:
        """Mark ``tensors`` as having the same values on all ranks."""
        for x in tensors:
            if isinstance(x, Tensor) and x.is_meta and x.numel() <= _FEW:
                storage = StorageWeakRef(x.untyped_storage())
                self._agreed[storage.cdata] = storage

    def _uses_agreed(self, args: tuple, kwargs: dict) -> bool:
        """Whether an argument has values that ranks have agreed on."""
        few = (x for x in _leaves(args, kwargs) if isinstance(x, Tensor) and x.numel() <= _FEW)
        return any(x.untyped_storage()._cdata in self._agreed for x in few)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs or {})
        result = self._run(func, args, kwargs or {})
        if self._agreed and self._uses_agreed(args, kwargs or {}):
            self.agree_on(result if isinstance(result, tuple) else (result,))
        return result

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor)]
        if not any(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        if func in self._host_values:
            return self._host_values[func](*args)
        if has_data_dependent_shape(func, args):
            selected = result_for_all_elements(func, *args, **kwargs)
            return selected[:0] if self._nothing_counts and func in SELECTING else selected
        if func is aten.copy_.default:
            return args[0] if args[0].is_meta else args[0].zero_()
        if func in _COPIES and torch.device(kwargs.get("device") or DEVICE).type != DEVICE:
            device = DEVICE if args[0].numel() > _LARGEST else "cpu"
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=device)
        if func is aten.repeat_interleave.Tensor:
            return torch.empty(kwargs.get("output_size") or args[0].numel(), dtype=torch.long, device=DEVICE)
        kind = _kind(func)
        if kind == "in place" and all(x.is_meta for x in tensors):
            return args[0]
        if kind == "out" and all(x.is_meta for x in tensors):
            return _output(func, kwargs)
        if kind == "fused":
            return None
        return self._cached(func, args, kwargs) if kind == "new" else func(*args, **kwargs)

    def _cached(self, func: Any, args: tuple, kwargs: dict) -> Any:
        key = func, _description(args), tuple((name, _description(value)) for name, value in kwargs.items())
        try:
            known = self._results.get(key)
        except TypeError:  # an argument is not hashable
            return func(*args, **kwargs)
        if known is not None:
            return _from_description(known)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) or (isinstance(result, tuple) and all(isinstance(x, Tensor) for x in result)):
            self._results[key] = _description(result)
        return result


def _leaves(args: tuple, kwargs: dict) -> Iterator[Any]:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


@cache
def _kind(func: Any) -> str:
    """What an operation returns: "new" tensors, its first argument ("in place"), its ``out`` argument ("out"), nothing
    ("fused"), or something else ("other")."""
    if str(func).startswith("aten._fused_"):
        return "fused"
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    if not any(value.alias_info for value in (*arguments, *returns)):
        return "new"
    if sum(written) == len(returns) == 1 and arguments[written.index(True)].kwarg_only:
        return "out"
    only_first = written and written[0] and not any(written[1:]) and torch.Tag.inplace_view not in func.tags
    return "in place" if only_first and len(returns) == 1 and func.namespace == "aten" else "other"


def _output(func: Any, kwargs: dict) -> Any:
    """The ``out`` argument of an operation, which already has the right shape."""
    return next(kwargs[argument.name] for argument in func._schema.arguments if argument.is_out)


def _description(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple, *map(_description, value)
    return value


def _from_description(description: Any) -> Any:
    kind, *rest = description
    if kind is tuple:
        return tuple(map(_from_description, rest))
    shape, stride, dtype, device = rest
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _on_device(build_module: Callable[..., Any]) -> Callable[..., Any]:
    """``build_module`` that creates parameters on the device: moving them there later would replace the objects."""

    def built(*arguments: Any) -> Any:
        with torch.device(DEVICE):
            return build_module(*arguments)

    return built


def _always_equal(compare: Callable[[list], Any]) -> Callable[[list], Any]:
    """A comparison with the numbers of rank 0 that always succeeds, since the device has no data."""

    def call(numbers: list) -> list:
        with suppress(RuntimeError):
            compare(numbers)
        return numbers

    return call


def _with_agreement(reduce: Callable[..., Any], mode: _Memoryless) -> Callable[..., Any]:
    """A collective that marks its results as equal on all ranks."""

    def call(group: OneRankGroup, tensors: list[Tensor], opts: Any = None) -> Any:
        work = reduce(group, tensors, opts)
        mode.agree_on(tensors)
        return work

    return call


def _with_equal_rows(make_route: Callable[..., None], to_first: bool) -> Callable[..., None]:
    """``AllToAllRoute.__init__`` that sends an equal number of rows to each rank, or all rows ``to_first``."""
    from megatron.parallel import expert

    rows_of_ranks = expert.rows_of_ranks

    def make(route: Any, weights: Tensor, chosen: Tensor, *arguments: Any) -> None:
        def rows(going: Tensor, coming: Tensor) -> list[list[int]]:
            rows_of_ranks(going, coming)
            ranks, rest = len(going), chosen.numel()
            shares = [rest // ranks + (rank < rest % ranks) for rank in range(ranks)]
            return [[rest, *[0] * (ranks - 1)] if to_first else shares] * 2

        with patch.object(expert, "rows_of_ranks", rows):
            make_route(route, weights, chosen, *arguments)

    return make


class _Maxima(list):
    """Result of ``max_across_ranks``: the loss on the device, and the other values on the host."""

    def tolist(self) -> list[float]:
        loss, *numbers = self
        return [loss.item(), *numbers]


def _with_host_values(max_across_ranks: Callable[..., Tensor]) -> Callable[..., _Maxima]:
    """``max_across_ranks`` that keeps signals and the checkpoint's state, which the device would lose, on the host."""

    def maxima(loss: Tensor, *values: float) -> _Maxima:
        largest, *_ = max_across_ranks(loss, *values)
        return _Maxima([largest, *values])

    return maxima


@contextmanager
def memoryless(*, nothing_counts: bool = False, on_operation: OperationHook | None = None) -> Iterator[None]:
    """Context in which programs use this device in place of CUDA. DS_ACCELERATOR must be ``cuda``.

    ``on_operation`` is called before each torch operation that does not return a view, with the operation and its
    arguments.
    """
    mode = _Memoryless(nothing_counts, on_operation)
    agreeing = ("allreduce", "broadcast") if nothing_counts else ()
    with (
        patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"),
        patched(*_cuda_patches(nothing_counts)),
        patched(*((OneRankGroup, name, _with_agreement(getattr(OneRankGroup, name), mode)) for name in agreeing)),
        mode,
    ):
        yield


def _cuda_patches(nothing_counts: bool) -> Iterator[tuple[Any, str, Any]]:
    """Patches (owner, name, value) that replace CUDA by this device, and code that would read values from it."""
    from megatron.checkpoint import save, tensor_files
    from megatron.engines import build
    from megatron.ops import attention
    from megatron.ops.choices import DeviceFacts
    from megatron.ops.linear import StackedLinearKernel
    from megatron.parallel.expert import AllToAllRoute
    from megatron.training import preflight, setup, trainer

    facts = DeviceFacts("cuda", (9, 0), has_varlen=False)
    for module in (attention, setup):
        yield module, "device_facts", lambda device: facts
    yield real_accelerator, "ds_accelerator", MemorylessAccelerator()
    yield trainer, "max_across_ranks", _with_host_values(trainer.max_across_ranks)
    yield os, "fsync", lambda _: None  # only this process reads its files
    yield tensor_files, "_check_content", lambda *_, **__: None  # tensors in its files have no data
    for owner, check in (
        (save, "check_disk_space"),
        (preflight, "check_memory"),
        (setup, "check_device"),
        (setup, "check_fp8"),
        (setup, "build_extensions"),
        *((module, "_device_dtype_check_for_fused") for module in (adam, adagrad, sgd)),
    ):
        yield owner, check, lambda *_, **__: None
    yield setup, "device_name", lambda: "none: shapes only"
    yield setup, "describe_cuda", lambda *_: "none"
    for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"):
        yield zero_utils, name, _always_equal(getattr(zero_utils, name))
    yield torch, "Generator", AnyGenerator
    yield torch, "get_autocast_dtype", lambda device: torch.float32
    yield torch, "is_autocast_enabled", lambda device=DEVICE: False
    yield torch, "autocast", lambda *_, **__: nullcontext()
    yield StackedLinearKernel, "forward", lambda _, x, weight, rows: x.new_empty(len(x), weight.size(1))
    yield StackedLinearKernel, "input_gradient", lambda _, x, weight, rows: x.new_empty(len(x), weight.size(2))
    yield StackedLinearKernel, "weight_gradient", lambda _, grad, x, weight, rows: torch.zeros_like(weight)
    yield AllToAllRoute, "__init__", _with_equal_rows(AllToAllRoute.__init__, nothing_counts)
    yield Tensor, "record_stream", lambda *_: None
    yield build, "build_module", _on_device(build.build_module)
