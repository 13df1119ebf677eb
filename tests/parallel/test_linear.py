"""Gradients that a matrix product adds up itself."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from megatron.parallel.tensor.layers import accumulate_in_place, linear


@pytest.mark.parametrize("bias", [False, True])
def test_micro_batches_add_up_in_place(bias: bool):
    """As autograd does it, but autograd hands on the first micro-batch's gradient alone."""
    torch.manual_seed(1)
    plain, fused = nn.Linear(5, 3, bias=bias), nn.Linear(5, 3, bias=bias)
    fused.load_state_dict(plain.state_dict())
    accumulate_in_place(fused.weight)
    seen: list[torch.Tensor | None] = []
    fused.weight.register_hook(seen.append)
    for _ in range(3):
        inputs = [torch.randn(2, 4, 5).requires_grad_()]
        inputs.append(inputs[0].detach().clone().requires_grad_())
        for layer, x in zip((plain, fused), inputs, strict=True):
            linear(x, layer.weight, layer.bias).square().sum().backward()
        assert_close(inputs[1].grad, inputs[0].grad)
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        assert_close(other.grad, one.grad)
    assert [gradient is not None for gradient in seen] == [True, False, False]
