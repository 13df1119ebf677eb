"""Torch's compiler is imported by what compiles, and no longer by the first optimizer of every run."""

import sys
from collections.abc import Callable
from functools import cache, wraps
from types import CodeType, FunctionType
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch.optim import Optimizer, optimizer


def import_compiler_late() -> None:
    """Let optimizers, ZeRO and recomputation work without torch's compiler while nothing has imported it.

    They import it to keep it from tracing them; as long as it is not there, nothing is traced. Once something has
    imported it, they do what they did before. Nothing changes where it is there already.

    torch: _compile.py, ``_disable_dynamo``, around methods of every optimizer and around ``checkpoint``;
    optim/optimizer.py, ``_use_grad_for_differentiable``, around ``step``. DeepSpeed:
    runtime/zero/muon/original_muon.py, which every ZeRO optimizer imports, compiles three functions where it defines
    them; ZeRO 3 imports the compiler in runtime/zero/parameter_offload.py, too, and still does.
    Tests: tests/parallel/test_late_compiler.py, tests/launch/test_launchers.py. Remove when a run without
    ``--compile`` does not import torch._dynamo.
    """
    if _is_imported():
        return
    for owner in (Optimizer, torch.utils.checkpoint, checkpointing):
        for member in list(vars(owner).values()):
            disable_late(member)
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and _is_made_in(optimizer._use_grad_for_differentiable, vars(kind).get("step")):
            kind.step = _step_late(kind.step)  # type: ignore[attr-defined]
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


def compiled_late(function: Callable) -> Callable:
    """``torch.compile(function)``, made when it is called first."""
    compiled = cache(lambda: torch.compile(function))
    return wraps(function)(lambda *args, **options: compiled()(*args, **options))


def _is_imported() -> bool:
    return sys.modules.get("torch._dynamo") is not None


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
    constants: tuple[Any, ...] = maker.__code__.co_consts  # type: ignore[attr-defined]
    codes = [constant for constant in constants if isinstance(constant, CodeType)]
    return isinstance(function, FunctionType) and function.__code__ in codes and hasattr(function, "__wrapped__")
