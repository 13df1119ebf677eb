"""When torch.compile's module, torch._dynamo, is imported: before the model is built, or not at all."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


def learn_functions_of_torch() -> None:
    """Make torch.compile build its table of traceable functions before ZeRO 3 replaces some of them.

    DeepSpeed 0.19.8: runtime/zero/partition_parameters.py replaces torch.arange and others while a model is built. A
    table built during that time lacks the real functions, and every use of RoPE breaks the graph.
    Test: tests/training/test_compile.py.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


_NAME = "torch._dynamo"


def import_compiler_late() -> None:
    """Delay the import of torch._dynamo until it is used, in a run without ``--compile``.

    Not for a run with ``--compile``: functions excluded from compilation before the import would not stay excluded.

    torch: optimizers and DeepSpeed's ZeRO 3 import torch._dynamo to exclude functions from compilation.
    DeepSpeed: runtime/zero/muon/original_muon.py, which every ZeRO optimizer imports but no run uses here, decorates
    functions with torch.compile. A rank starts in 1.7 s instead of 2.9 s (ZeRO 0) or 3.7 s (ZeRO 1), and takes 70 to
    110 MB less memory.
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
    """Stands in for torch._dynamo while only ``disable`` and ``graph_break`` are used; then imports the real one."""

    @staticmethod
    def disable(fn: Callable | None = None, *_: Any, **__: Any) -> Callable:
        """Return ``fn`` unchanged, or a decorator that does so."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing: nothing is traced."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real module. Dunder names are not forwarded, except ``__path__`` for submodules."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute of the real module, as the import of a submodule does."""
        setattr(self._real(), name, value)

    def _real(self) -> ModuleType:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], vars(torch)["_dynamo"]
        return importlib.import_module(_NAME)
