"""Every variant of an operation against its plain torch reference: output and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.ops import activation, cross_entropy, linear, norm

DTYPES = (torch.float32, torch.bfloat16)
SIZE = 24


def _leaf(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def _tolerances(dtype: torch.dtype) -> dict[str, float]:
    return {} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_and_rms_norm(dtype: torch.dtype) -> None:
    norms = norm.CpuRMSNorm(SIZE, eps=1e-5), nn.RMSNorm(SIZE, eps=1e-5)
    for layer in norms:
        layer.to(dtype).weight.data.copy_(torch.linspace(0.5, 2, SIZE))
    for functions in ((activation.lean_swiglu, activation.swiglu), norms):
        inputs = _leaf(dtype, 3, 5, SIZE), _leaf(dtype, 3, 5, SIZE)
        outputs = [function(x) for function, x in zip(functions, inputs, strict=True)]
        for output in outputs:
            output.float().square().sum().backward()
        assert_close(*outputs, **_tolerances(dtype))
        assert_close(inputs[0].grad, inputs[1].grad, **_tolerances(dtype))
    assert_close(norms[0].weight.grad, norms[1].weight.grad, **_tolerances(dtype))


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 7, 0], [0, 0, 0]])
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [*((linear.StackedLinearKernel, dtype) for dtype in DTYPES), (linear.GroupedLinearKernel, torch.bfloat16)],
)
def test_stacked_linear(kernel: type[linear.StackedLinearKernel], dtype: torch.dtype, counts: list[int]) -> None:
    """One matmul for each weight, or for all, equals ``F.linear`` of its rows; weights may have none."""
    inputs = [_leaf(dtype, sum(counts), SIZE) for _ in range(2)]
    weights = [nn.Parameter(_leaf(dtype, 3, 8, SIZE).detach()) for _ in range(2)]
    stacked = kernel()
    rows = stacked.rows_of(torch.tensor(counts).cumsum(0))
    ours = linear.stacked_linear(inputs[0], weights[0], rows, stacked, lambda gradient, weight: False)
    plain = torch.cat([F.linear(x, w) for x, w in zip(inputs[1].split(counts), weights[1], strict=True)])
    for output in (ours, plain):
        output.float().square().sum().backward()
    assert_close(ours, plain, **_tolerances(dtype))
    assert_close(inputs[0].grad, inputs[1].grad, **_tolerances(dtype))
    assert_close(weights[0].grad, weights[1].grad, **_tolerances(dtype))


aten = torch.ops.aten
TOUCHES_LITTLE = {aten.gather.default, aten.index_put_.default, aten.empty_like.default, aten.new_empty.default}


class _Bytes(TorchDispatchMode):
    """Adds up what operations read and write."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view and func not in TOUCHES_LITTLE:
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)}
            self.moved += sum(tensor.nbytes for tensor in tensors.values())
        return found


def test_compiled_cross_entropy_moves_a_third_of_the_bytes() -> None:
    """Of each bf16 logit: plain torch converts it, computes the softmax, and converts that; the compiler at once."""
    r, v = 64, 4096
    logits, index, scale = torch.zeros(r, v, dtype=torch.bfloat16), torch.zeros(r, dtype=torch.long), torch.zeros(r)

    def both_passes(kernel: cross_entropy.CrossEntropyKernel, *tensors: Tensor) -> None:
        of_logits, of_index, of_scale = tensors
        found = kernel.statistics(of_logits, of_index, v, torch.float32, False)
        kernel.gradient(of_logits, found[1], of_index, of_scale, of_scale.clone(), v)

    shapes = [tensor.to("meta") for tensor in (logits, index, scale)]
    with _Bytes() as plain:
        both_passes(cross_entropy.CrossEntropyKernel(), *shapes)
    metrics.reset()
    both_passes(cross_entropy.CompiledCrossEntropyKernel(), logits, index, scale)
    assert plain.moved / (r * v) == pytest.approx(34, abs=0.5)
    assert metrics.num_bytes_accessed / (r * v) < 10
