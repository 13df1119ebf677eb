"""Torch's compiler is imported by what compiles, and no longer by the first optimizer of every run."""

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer


def import_compiler_late() -> None:
    """Let optimizers, ZeRO and recomputation work without torch's compiler while nothing has imported it.

    They import it to keep it from tracing them; as long as it is not there, nothing is traced. Once something has
    imported it, they do what they did before. Nothing changes where it is there already.

    torch: _compile.py, ``_disable_dynamo``, around methods of every optimizer and around ``checkpoint``;
    optim/optimizer.py, ``_use_grad_for_differentiable``, around ``step``; autograd/__init__.py, ``_make_grads``, which
    compares shapes as if they might be symbols of the compiler. DeepSpeed: runtime/zero/muon/original_muon.py, which
    every ZeRO optimizer imports, compiles three functions where it defines them; ZeRO 3 disables the compiler in its
    hooks and its coordinator, runtime/zero/parameter_offload.py and partitioned_param_coordinator.py.
    Tests: tests/engines/test_late_compiler.py, tests/launch/test_launchers.py. Remove when a run without
    ``--compile`` does not import torch._dynamo.
    """
    if _is_imported() or hasattr(torch.autograd._make_grads, "__wrapped__"):
        return
    coordinators = (partitioned_param_coordinator, partitioned_param_coordinator.PartitionedParameterCoordinator)
    for owner in (Optimizer, torch.utils.checkpoint, checkpointing, *coordinators):
        for member in list(vars(owner).values()):
            disable_late(member)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and _is_made_in(optimizer._use_grad_for_differentiable, vars(kind).get("step")):
            kind.step = _step_late(kind.step)  # type: ignore[attr-defined]
    torch.compiler.disable = _disabled_late(torch.compiler.disable)
    torch.autograd._make_grads = _grads_without_symbols(torch.autograd._make_grads)
    with patch("torch.compile", compiled_late):
        from deepspeed.runtime.zero.muon import original_muon  # noqa: F401


def disable_late(function: Any) -> None:
    """If ``function`` is one that torch's ``_disable_dynamo`` has made, let it ask the compiler once that is there."""
    if not _is_made_in(torch._disable_dynamo, function):
        return
    inner = function.__wrapped__

    def not_traced(*args: Any, **options: Any) -> Any:
        if not _is_imported():
            return inner(*args, **options)
        delattr(inner, "__dynamo_disable")
        return function(*args, **options)

    setattr(inner, "__dynamo_disable", not_traced)  # what torch keeps there is what the compiler has answered


def _disabled_late(disable: Callable) -> Callable:
    @wraps(disable)
    def disabled(fn: Any = None, *args: Any, **options: Any) -> Any:
        if _is_imported() or not isinstance(fn, FunctionType):
            return disable(fn, *args, **options)
        by_compiler = cache(lambda: disable(fn, *args, **options))
        return wraps(fn)(lambda *a, **o: (by_compiler() if _is_imported() else fn)(*a, **o))

    return disabled


def compiled_late(function: Callable) -> Callable:
    """``torch.compile(function)``, made when it is called first."""
    compiled = cache(lambda: torch.compile(function))
    return wraps(function)(lambda *args, **options: compiled()(*args, **options))


def _is_imported() -> bool:
    return sys.modules.get("torch._dynamo") is not None


def _grads_without_symbols(make: Callable) -> Callable:
    """``make``, which checks the shapes of the gradients with which a backward pass begins; equal ones have passed."""

    @wraps(make)
    def made(outputs: Sequence[Any], grads: Sequence[Any], is_grads_batched: bool) -> tuple[Any, ...]:
        if is_grads_batched or _is_imported() or not all(map(_fits, outputs, grads)):
            return make(outputs, grads, is_grads_batched)
        return tuple(grads)

    return made


def _fits(output: Any, grad: Any) -> bool:
    plain = type(grad) is Tensor and type(output) in (Tensor, nn.Parameter) and not output.is_nested
    return plain and output.shape == grad.shape and not output.is_complex() and not grad.is_complex()


def _step_late(step: Callable) -> Callable:
    inner: Callable = step.__wrapped__  # type: ignore[attr-defined]

    @wraps(inner)
    def stepped(self: Optimizer, *args: Any, **options: Any) -> Any:
        if _is_imported():
            return step(self, *args, **options)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inner(self, *args, **options)

    return stepped


def _is_made_in(maker: Callable, function: Any) -> bool:
    """Whether ``function`` is one that ``maker`` defines and returns."""
    constants: tuple[Any, ...] = maker.__code__.co_consts
    codes = [constant for constant in constants if isinstance(constant, CodeType)]
    return isinstance(function, FunctionType) and function.__code__ in codes and hasattr(function, "__wrapped__")
