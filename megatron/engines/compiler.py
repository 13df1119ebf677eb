"""Torch's compiler, which every optimizer imports although most runs compile nothing, is imported by what compiles."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

_NAME = "torch._dynamo"


def import_compiler_late() -> None:
    """Let a run that compiles no layers, and has not imported torch's compiler, start without it.

    Not for a run with ``--compile``: what is excluded from compilation before the compiler is imported stays included.

    torch: optimizers and DeepSpeed's ZeRO 3 import torch._dynamo to exclude functions from compilation.
    DeepSpeed: runtime/zero/muon/original_muon.py, which every ZeRO optimizer imports and no run of ours uses, compiles
    functions where it defines them. A rank starts in 1.7 s instead of 2.9 s (ZeRO 0) or 3.7 s (ZeRO 1), and
    takes 70 to 110 MB less memory.
    Tests: tests/engines/test_late_compiler.py, tests/launch/test_launchers.py. Remove when a run without ``--compile``
    does not import torch._dynamo.
    """
    if _NAME in sys.modules:
        return
    with patch("torch.compile", lambda function: function):
        from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    placeholder = _Placeholder(_NAME)
    sys.modules[_NAME] = placeholder
    vars(torch)["_dynamo"] = placeholder


class _Placeholder(ModuleType):
    """torch._dynamo for those who only exclude functions from compilation. Any other use imports the real module."""

    @staticmethod
    def disable(fn: Callable | None = None, *_: Any, **__: Any) -> Callable:
        """``fn`` itself, or a decorator that returns what it is given."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Nothing is traced here."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real module; of the module's own ones only the path, by which submodules are found."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it in the real module, as the import of a submodule does."""
        setattr(self._real(), name, value)

    def _real(self) -> ModuleType:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], vars(torch)["_dynamo"]
        return importlib.import_module(_NAME)
