"""The gradient of a table that words are looked up in, and that logits are computed with: one tensor of its size."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.tensor.linear import accumulate_in_place, linear
from megatron.parallel.tensor.lookup import lookup, share_gradient_with_lookups

ROWS, HIDDEN = 30, 8
Model = Callable[[nn.Parameter], Tensor]


def _table() -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(1)))


def _tokens(seed: int = 1) -> Tensor:
    return torch.randint(ROWS, (2, 20), generator=torch.Generator().manual_seed(seed))


def _loss(table: nn.Parameter, find: Callable[..., Tensor] = lookup, *, lookups: int = 1, tied: bool = True) -> Tensor:
    hidden = sum(find(_tokens(seed), table) for seed in range(lookups)).tanh()
    if not tied:
        return hidden.square().sum()
    return share_gradient_with_lookups(linear(hidden, table), table).square().mean()


def _gradient(table: nn.Parameter, **options) -> Tensor:
    table.grad = None
    _loss(table, **options).backward()
    return table.grad


class _Sizes(TorchDispatchMode):
    """How many tensors of the table's size are made."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        if isinstance(out, Tensor) and out.shape == (ROWS, HIDDEN):
            self.found.add(out.untyped_storage()._cdata)
        return out


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_is_that_of_torch(lookups: int, tied: bool):
    table = _table()
    expected = _gradient(table, find=F.embedding, lookups=lookups, tied=tied)
    assert_close(_gradient(table, lookups=lookups, tied=tied), expected)
    assert not table._backward_hooks


def test_one_tensor_is_as_large_as_the_table():
    table = _table()
    loss = _loss(table)
    with _Sizes() as sizes:
        loss.backward()
    assert len(sizes.found - {table.untyped_storage()._cdata}) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_micro_batches_add_up(in_place: bool):
    one, other = _table(), _table()
    if in_place:
        accumulate_in_place(other)
    for _ in range(3):
        _loss(one, F.embedding).backward()
        _loss(other).backward()
    assert_close(other.grad, one.grad)


def test_logits_and_lookups_of_several_passes_in_turn():
    """As where a rank has the first and the last layers of a pipeline, and differentiates each by itself."""
    table = _table()
    expected = _gradient(table, find=F.embedding, lookups=2)
    table.grad = None
    hidden = [lookup(_tokens(seed), table) for seed in range(2)]
    received = sum(hidden).detach().requires_grad_()
    share_gradient_with_lookups(linear(received.tanh(), table), table).square().mean().backward()
    torch.autograd.backward(hidden, [received.grad] * 2)
    assert_close(table.grad, expected)


def test_hooks_see_the_whole_gradient():
    table, seen = _table(), []
    table.register_hook(lambda gradient: seen.append(gradient.clone()))
    assert torch.equal(_gradient(table), seen[0])


def test_a_pass_that_fails_leaves_nothing_for_the_next():
    table = _table()
    expected = _gradient(table).clone()
    table.grad = None

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("out of memory")

    first, second = lookup(_tokens(0), table), lookup(_tokens(1), table)  # the second is differentiated first
    first.register_hook(fail)
    logits = share_gradient_with_lookups(linear(first + second, table), table)
    with pytest.raises(RuntimeError, match="out of memory"):
        logits.sum().backward()
    assert table._backward_hooks
    table.grad = None
    assert_close(_gradient(table), expected)
    assert not table._backward_hooks


def test_no_hook_where_lookups_are_those_of_torch():
    """As on a GPU, where a hook would be called for nothing."""
    table = nn.Parameter(torch.empty(ROWS, HIDDEN, device="meta"))
    logits = share_gradient_with_lookups(linear(torch.empty(2, HIDDEN, device="meta"), table), table)
    assert logits.requires_grad and not logits._backward_hooks
