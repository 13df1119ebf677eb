"""Every variant of an operation against its plain torch reference: output and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from megatron.ops import activation, cpu

DTYPES = (torch.float32, torch.bfloat16)
SIZE = 24


def _plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _leaf(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def _tolerances(dtype: torch.dtype) -> dict[str, float]:
    return {} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    ours, plain = _leaf(dtype, 3, 5, SIZE), _leaf(dtype, 3, 5, SIZE)
    outputs = activation.swiglu(ours), _plain_swiglu(plain)
    for output in outputs:
        output.float().square().sum().backward()
    assert_close(*outputs, **_tolerances(dtype))
    assert_close(ours.grad, plain.grad, **_tolerances(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_on_cpus(dtype: torch.dtype) -> None:
    norms = cpu.RMSNorm(SIZE, eps=1e-5), nn.RMSNorm(SIZE, eps=1e-5)
    inputs = _leaf(dtype, 3, 5, SIZE), _leaf(dtype, 3, 5, SIZE)
    for norm, x in zip(norms, inputs, strict=True):
        norm.to(dtype).weight.data.copy_(torch.linspace(0.5, 2, SIZE))
        norm(x).float().square().sum().backward()
    assert_close(norms[0](inputs[0]), norms[1](inputs[1]), **_tolerances(dtype))
    assert_close(inputs[0].grad, inputs[1].grad, **_tolerances(dtype))
    assert_close(norms[0].weight.grad, norms[1].weight.grad, **_tolerances(dtype))
