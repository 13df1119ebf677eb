"""The matmuls of a linear layer: output, gradient of the input, gradient of the weight.

r rows: all tokens of a rank, i inputs, o outputs
"""

from torch import Tensor
from torch.nn import functional as F

from megatron.config import ModelConfig


class LinearKernel:
    """y = x W^T + b and its gradients, in plain torch.

    A layer makes one object for each weight, and passes the weight to every call, since ZeRO 3 gathers it for the call
    only. A variant of lower precision can so quantize weight, input and gradient where they are used, and keep the
    quantized weight in the object until ``weight._version`` changes.
    """

    has_own_gradients = False
    """Whether the gradients of a layer come from the methods below also where autograd could derive those of
    ``forward``."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [.., i], weight [o, i], bias [o] -> [.., o]."""
        return F.linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [r, o], weight [o, i] -> [r, i]."""
        return grad @ weight

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        """grad [r, o], x [r, i] -> [o, i]; None if it was added to ``weight.grad``."""
        return grad.t() @ x


class AccumulatingLinearKernel(LinearKernel):
    """Adds the weight's gradient to ``weight.grad`` from the second micro-batch of a step on, within the matmul.

    For engines that do not touch ``weight.grad`` before the step, and weights without hooks, which would receive no
    gradient.
    """

    has_own_gradients = True

    def weight_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
        if not weight.is_leaf or weight.grad is None:
            return super().weight_gradient(grad, x, weight)
        weight.grad.addmm_(grad.t(), x)
        return None


def linear_kernel(config: ModelConfig) -> type[LinearKernel]:
    """The class for the linear layers of a model."""
    return AccumulatingLinearKernel if config.gradient_accumulation_fusion else LinearKernel
