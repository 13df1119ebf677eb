"""What torch keeps from its compiler works alike before and after something has imported the compiler."""

import sys
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.fx.experimental import symbolic_shapes
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from megatron.engines.compiler import compiled_late, import_compiler_late

COMPILER, SYMBOLS = "torch._dynamo", "torch.fx.experimental.symbolic_shapes"


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported it; whatever tries to, raises."""
    for kind in vars(torch.optim).values():
        if isinstance(kind, type) and (step := vars(kind).get("step")):
            while hasattr(step, "hooked"):  # by an optimizer of an earlier test
                step = step.__wrapped__
            monkeypatch.setattr(kind, "step", step)
    monkeypatch.setattr(torch.compiler, "disable", torch.compiler.disable)
    monkeypatch.setattr(torch.autograd, "_make_grads", torch.autograd._make_grads)
    monkeypatch.setitem(sys.modules, COMPILER, None)
    monkeypatch.setitem(sys.modules, SYMBOLS, None)
    import_compiler_late()


def trained() -> tuple[Tensor, dict]:
    """Weights and state after two steps with recomputation, the second of a resumed optimizer."""
    layer, x = nn.Linear(3, 3), torch.linspace(-1, 1, 12).view(4, 3)
    nn.init.eye_(layer.weight)
    nn.init.ones_(layer.bias)
    state: dict = {}
    for _ in range(2):
        optimizer = AdamW(layer.parameters(), lr=0.1)
        if state:
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
    return layer.weight.detach(), state["state"][0]


def test_an_optimizer_needs_no_compiler(without_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, state = trained()
    kept = [method.__wrapped__ for method in (Optimizer.zero_grad, Optimizer.load_state_dict, checkpoint)]
    assert not any(is_disabled(function) for function in kept)
    monkeypatch.setitem(sys.modules, COMPILER, torch._dynamo)
    beside, same_state = trained()
    assert all(is_disabled(function) for function in kept), "the compiler would trace them"
    assert torch.equal(alone, beside) and state["step"] == same_state["step"] == 2
    assert torch.equal(state["exp_avg"], same_state["exp_avg"])


def test_gradients_of_other_shapes_are_refused(without_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.backward([2 * x, 3 * x], [torch.ones(2, 3), torch.full((2, 3), 2.0)])
    assert torch.equal(x.grad, torch.full((2, 3), 8.0))
    weight = nn.Parameter(torch.zeros(2, 3))
    torch.autograd.backward(weight, torch.ones(2, 3))
    assert torch.equal(weight.grad, torch.ones(2, 3))
    monkeypatch.setitem(sys.modules, SYMBOLS, symbolic_shapes)
    for wrong, message in ((torch.ones(3, 2), "Mismatch in shape"), (torch.ones(2, 3) * 1j, "Mismatch in dtype")):
        with pytest.raises(RuntimeError, match=message):
            torch.autograd.backward([2 * x], [wrong])


def is_disabled(function: object) -> bool:
    """Whether the compiler has been asked not to trace it."""
    return getattr(getattr(function, "__dynamo_disable"), "_torchdynamo_disable", False)  # noqa: B009


def test_a_function_is_compiled_when_it_is_called_first() -> None:
    with patch("torch.compile", side_effect=lambda function: function) as compile_:
        late = compiled_late(lambda x: x + 1)
        compile_.assert_not_called()
        assert [late(1), late(2)] == [2, 3]
        compile_.assert_called_once()
