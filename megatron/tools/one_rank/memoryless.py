"""A device without memory: its tensors have shapes and types, and nothing is computed.

It takes torch's meta device for CUDA's, under an accelerator of DeepSpeed's. Where a program reads numbers from it, a
floating-point number is 1, a condition False, a whole number 0; where a shape depends on numbers, every element counts.
With ``nothing_counts`` the former are 0 and True, and no element counts, as of a batch that has nothing to learn from;
but not what ranks have agreed on, which is computed from a few numbers that were reduced.
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
from torch.optim import adam
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.tools.one_rank import replaced
from megatron.tools.one_rank.accelerator import DEVICE, AnyGenerator, MemorylessAccelerator
from megatron.tools.one_rank.data_dependent import SELECTING, has_data_dependent_shape, of_every_element
from megatron.tools.one_rank.group import OneRankGroup

aten = torch.ops.aten
Computed = Callable[[Any, tuple, dict], None]
_LARGEST = 1024
"""Elements of a tensor that a program reads on the host; larger ones it saves, and they stay on the device."""
_FEW = 8
"""Elements of a tensor that ranks reduce to take a decision."""
_COPIES = (aten._to_copy.default, aten.empty_like.default)


class _Memoryless(TorchDispatchMode):
    """Operations on the device. The shapes of their results are remembered: torch finds them in Python."""

    def __init__(self, nothing_counts: bool, computed: Computed | None) -> None:
        super().__init__()
        self._computed = computed
        self._known: dict[Any, Any] = {}
        self._empty = nothing_counts
        self._agreed: dict[int, StorageWeakRef] = {}
        self._answers: dict[Any, Callable[..., Any]] = {
            aten._local_scalar_dense.default: self._number,
            aten.is_nonzero.default: self._is_extreme,
            aten.equal.default: lambda x, y: True,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard against it takes as long as an operation

    def _number(self, x: Tensor) -> Any:
        if x.dtype.is_floating_point:
            return float(not self._is_extreme(x))
        return self._is_extreme(x) if x.dtype == torch.bool else 0

    def _is_extreme(self, x: Tensor) -> bool:
        return self._empty and x.untyped_storage()._cdata not in self._agreed

    def agree_on(self, tensors: Iterable[Any]) -> None:
        """All ranks have the same numbers in ``tensors``."""
        for x in tensors:
            if isinstance(x, Tensor) and x.is_meta and x.numel() <= _FEW:
                storage = StorageWeakRef(x.untyped_storage())
                self._agreed[storage.cdata] = storage

    def _follows(self, args: tuple, kwargs: dict) -> bool:
        """Whether a result is computed from numbers that ranks have agreed on."""
        few = (x for x in _leaves(args, kwargs) if isinstance(x, Tensor) and x.numel() <= _FEW)
        return any(x.untyped_storage()._cdata in self._agreed for x in few)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if self._computed is not None:
            self._computed(func, args, kwargs or {})
        result = self._dispatched(func, args, kwargs or {})
        if self._agreed and self._follows(args, kwargs or {}):
            self.agree_on(result if isinstance(result, tuple) else (result,))
        return result

    def _dispatched(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors = [leaf for leaf in _leaves(args, kwargs) if isinstance(leaf, Tensor)]
        if not any(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        if func in self._answers:
            return self._answers[func](*args)
        if has_data_dependent_shape(func, args):
            found = of_every_element(func, *args, **kwargs)
            return found[:0] if self._empty and func in SELECTING else found
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
        return self._remembered(func, args, kwargs) if kind == "new" else func(*args, **kwargs)

    def _remembered(self, func: Any, args: tuple, kwargs: dict) -> Any:
        key = func, _described(args), tuple((name, _described(value)) for name, value in kwargs.items())
        try:
            known = self._known.get(key)
        except TypeError:  # not to be hashed
            return func(*args, **kwargs)
        if known is not None:
            return _made(known)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) or (isinstance(result, tuple) and all(isinstance(x, Tensor) for x in result)):
            self._known[key] = _described(result)
        return result


def _leaves(args: tuple, kwargs: dict) -> Iterator[Any]:
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


@cache
def _kind(func: Any) -> str:
    """What becomes of an operation's result: "new" tensors, its first argument "in place", the one that it is written
    into ("out"), or something else."""
    if str(func).startswith("aten._fused_"):
        return "fused"
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
    if not any(one.alias_info for one in (*arguments, *returns)):
        return "new"
    if sum(written) == len(returns) == 1 and arguments[written.index(True)].kwarg_only:
        return "out"
    only_first = written and written[0] and not any(written[1:]) and torch.Tag.inplace_view not in func.tags
    return "in place" if only_first and len(returns) == 1 and func.namespace == "aten" else "other"


def _output(func: Any, kwargs: dict) -> Any:
    """The tensor that an operation is to write into, which has the right shape: nothing here relies on a resize."""
    return next(kwargs[argument.name] for argument in func._schema.arguments if argument.is_out)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple, *map(_described, value)
    return value


def _made(description: Any) -> Any:
    kind, *rest = description
    if kind is tuple:
        return tuple(map(_made, rest))
    shape, stride, dtype, device = rest
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _on_device(build_module: Callable[..., Any]) -> Callable[..., Any]:
    """``build_module``, whose parameters could not move to the device later and stay the same objects."""

    def built(*arguments: Any) -> Any:
        with torch.device(DEVICE):
            return build_module(*arguments)

    return built


def _answered(compare: Callable[[list], Any]) -> Callable[[list], Any]:
    """A comparison of numbers with those of rank 0, which the device forgets: they are equal."""

    def call(numbers: list) -> list:
        with suppress(RuntimeError):
            compare(numbers)
        return numbers

    return call


def _agreeing(reduce: Callable[..., Any], mode: _Memoryless) -> Callable[..., Any]:
    """A collective after which all ranks have the same numbers."""

    def call(group: OneRankGroup, tensors: list[Tensor], opts: Any = None) -> Any:
        work = reduce(group, tensors, opts)
        mode.agree_on(tensors)
        return work

    return call


def _routed(make_route: Callable[..., None], to_first: bool) -> Callable[..., None]:
    """``AllToAllRoute.__init__``, which sends equally many rows to each rank, or all ``to_first``."""
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


class _Agreed(list):
    """The loss, on the device, and numbers that the host has."""

    def tolist(self) -> list[float]:
        loss, *numbers = self
        return [loss.item(), *numbers]


def _agreed_by(max_across_ranks: Callable[..., Tensor]) -> Callable[..., _Agreed]:
    """``max_across_ranks``, of which the device would forget signals and the state of the checkpoint."""

    def agree(loss: Tensor, *values: float) -> _Agreed:
        largest, *_ = max_across_ranks(loss, *values)
        return _Agreed([largest, *values])

    return agree


@contextmanager
def memoryless(*, nothing_counts: bool = False, computed: Computed | None = None) -> Iterator[None]:
    """While inside, programs find this device in place of CUDA's. DS_ACCELERATOR has to be ``cuda``.

    ``computed`` is called with each operation of torch that makes no view, and its arguments, before it.
    """
    mode = _Memoryless(nothing_counts, computed)
    agreeing = ("allreduce", "broadcast") if nothing_counts else ()
    with (
        patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"),
        replaced(*_in_place_of_cuda(nothing_counts)),
        replaced(*((OneRankGroup, name, _agreeing(getattr(OneRankGroup, name), mode)) for name in agreeing)),
        mode,
    ):
        yield


def _in_place_of_cuda(nothing_counts: bool) -> Iterator[tuple[Any, str, Any]]:
    """Owner, name and value of what programs find for CUDA's device, and of what would read from this one."""
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
    yield trainer, "max_across_ranks", _agreed_by(trainer.max_across_ranks)
    yield os, "fsync", lambda _: None  # files that this process alone reads
    yield tensor_files, "_check_content", lambda *_, **__: None  # of them, whose tensors have no data
    for owner, check in (
        (save, "check_disk_space"),
        (preflight, "check_memory"),
        (setup, "check_device"),
        (setup, "check_fp8"),
        (setup, "build_extensions"),
        (adam, "_device_dtype_check_for_fused"),
    ):
        yield owner, check, lambda *_, **__: None
    yield setup, "_device_name", lambda: "none: shapes only"
    yield setup, "describe_cuda", lambda *_: "none"
    for name in ("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"):
        yield zero_utils, name, _answered(getattr(zero_utils, name))
    yield torch, "Generator", AnyGenerator
    yield torch, "get_autocast_dtype", lambda device: torch.float32
    yield torch, "is_autocast_enabled", lambda device=DEVICE: False
    yield torch, "autocast", lambda *_, **__: nullcontext()
    yield StackedLinearKernel, "forward", lambda _, x, weight, rows: x.new_empty(len(x), weight.size(1))
    yield StackedLinearKernel, "input_gradient", lambda _, x, weight, rows: x.new_empty(len(x), weight.size(2))
    yield StackedLinearKernel, "weight_gradient", lambda _, grad, x, weight, rows: torch.zeros_like(weight)
    yield AllToAllRoute, "__init__", _routed(AllToAllRoute.__init__, nothing_counts)
    yield Tensor, "record_stream", lambda *_: None
    yield build, "build_module", _on_device(build.build_module)
