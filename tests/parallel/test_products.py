"""Products by oneDNN, which are the choice on some processors only, give what MKL's do on any."""

from unittest.mock import patch

import pytest
import torch
from deepspeed.profiling.flops_profiler import profiler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.parallel.tensor import linear as linear_module
from megatron.parallel.tensor import products
from megatron.parallel.tensor.linear import accumulate_in_place, linear
from megatron.parallel.tensor.products import affine, product

ROWS, INPUTS, OUTPUTS = 24, 40, 56


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every product is one for oneDNN; the shapes of x of its calls."""
    calls: list[tuple[int, ...]] = []
    by_onednn = torch.ops.mkldnn._linear_pointwise.default

    def record(x: Tensor, *others) -> Tensor:
        calls.append(tuple(x.shape))
        return by_onednn(x, *others)

    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)
    monkeypatch.setattr(products, "_SMALL", 0)
    monkeypatch.setattr(torch.ops.mkldnn._linear_pointwise, "default", record)
    return calls


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    "x, y",
    [
        (_draw(ROWS, INPUTS), _draw(INPUTS, OUTPUTS)),
        (_draw(INPUTS, ROWS).t(), _draw(INPUTS, OUTPUTS)),
        (_draw(ROWS, INPUTS), _draw(OUTPUTS, INPUTS).t()),
        (_draw(INPUTS, ROWS).t(), _draw(OUTPUTS, INPUTS).t()),
        (_draw(ROWS, 2 * INPUTS)[:, INPUTS:], _draw(INPUTS, OUTPUTS)[:, ::2]),
        (_draw(1, INPUTS), _draw(INPUTS, 1)),
    ],
    ids=["plain", "x transposed", "y transposed", "both", "parts", "one number"],
)
def test_a_product_in_any_order(called: list, x: Tensor, y: Tensor) -> None:
    assert_close(product(x, y), (x.double() @ y.double()).float())
    assert len(called) == 1


def test_blocks_of_a_transposed_matrix(called: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the gradient of an output projection has it: one row for each token of the vocabulary."""
    monkeypatch.setattr(products, "_TALL", 50)
    monkeypatch.setattr(products, "_BLOCK", 16)
    x, y = _draw(INPUTS, 50).t(), _draw(INPUTS, OUTPUTS)
    expected = (x.double() @ y.double()).float()
    assert_close(product(x, y), expected)
    assert called == [(16, INPUTS)] * 3 + [(2, INPUTS)]
    total = torch.ones_like(expected)
    products.add_product(total, x, y)
    assert_close(total, expected + 1)
    assert called == ([(16, INPUTS)] * 3 + [(2, INPUTS)]) * 2
    called.clear()
    assert_close(product(x.contiguous(), y), expected)
    assert_close(product(x[:49], y), expected[:49])
    assert len(called) == 2


def test_a_bias_that_is_not_contiguous(called: list) -> None:
    x, weight, bias = _draw(ROWS, INPUTS), _draw(OUTPUTS, INPUTS), _draw(2 * OUTPUTS)[::2]
    assert_close(affine(x, weight, bias), F.linear(x, weight, bias))
    assert called


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_and_its_gradients(called: list, bias: bool, in_place: bool) -> None:
    """Of two micro-batches, against torch's in fp64: one product forward, two backward."""
    torch.manual_seed(1)
    ours = nn.Linear(INPUTS, OUTPUTS, bias=bias)
    exact = nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=torch.float64)
    exact.load_state_dict(ours.state_dict())
    if in_place:
        accumulate_in_place(ours.weight)
    for _ in range(2):
        x = torch.randn(2, ROWS, INPUTS)
        leaves = x.clone().requires_grad_(), x.double().requires_grad_()
        outputs = linear(leaves[0], ours.weight, ours.bias), exact(leaves[1])
        grad = torch.randn(2, ROWS, OUTPUTS)
        for output in outputs:
            output.backward(grad.to(output.dtype))
        assert_close(outputs[0], outputs[1].float())
        assert_close(leaves[0].grad, leaves[1].grad.float())
    for one, other in zip(ours.parameters(), exact.parameters(), strict=True):
        assert_close(one.grad, other.grad.float())
    assert len(called) == 6


def test_the_gradient_of_a_frozen_weight_is_not_computed(called: list) -> None:
    layer = nn.Linear(INPUTS, OUTPUTS).requires_grad_(False)
    linear(torch.randn(ROWS, INPUTS).requires_grad_(), layer.weight, layer.bias).sum().backward()
    assert len(called) == 2


def test_a_compiled_layer_calls_the_operator(called: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since the compiler would choose MKL."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with patch.object(linear_module, "_linear_operator", wraps=linear_module._linear_operator) as operator:
        layer, x = nn.Linear(INPUTS, OUTPUTS), torch.randn(ROWS, INPUTS).requires_grad_()
        output = linear(x, layer.weight, layer.bias)
    output.sum().backward()
    assert operator.called and len(called) == 3
    assert_close(output, F.linear(x, layer.weight, layer.bias))
    assert_close(x.grad, layer.weight.sum(0).expand_as(x))


def test_only_what_is_large_in_fp32_is_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)
    x, weight = torch.randn(1024, 64), torch.randn(64, 64)
    assert products.is_for_onednn(x, weight)
    assert not products.is_for_onednn(x[:8], weight)
    assert not products.is_for_onednn(x.bfloat16(), weight.bfloat16())
    assert not products.is_for_onednn(x.to("meta"), weight.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not products.is_for_onednn(x, weight)
    with patch.object(F, "linear", profiler.wrapFunc(F.linear, lambda *_, **__: (0, 0))):
        assert not products.is_for_onednn(x, weight), "DeepSpeed counts the operations of F.linear alone"
    assert products.is_for_onednn(x, weight)
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", False)
    assert not products.is_for_onednn(x, weight)
    assert_close(affine(x, weight), F.linear(x, weight))
