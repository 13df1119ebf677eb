"""The norm of a gradient: accurate however large a tensor is, and without a copy of it in a wider type.

On a CPU torch sums a tensor's squares one after the other in fp32: of 40 million the norm is wrong in its third digit.
DeepSpeed casts every gradient to fp64 first, which can be a fifth of a step. Here each tensor gives the norms of its
blocks, which both can then take for the tensor.
"""

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn

from megatron.parallel.layout import ParallelLayout

_BLOCK = 1 << 16
"""Elements of a block: small enough for a core's own cache, and for fp32 to hold its sum of squares."""


def block_norms(tensor: Tensor) -> Tensor:
    """2-norms in fp32 of parts of ``tensor``, whose own norm is the tensor's."""
    if tensor.device.type != "cpu":  # other devices sum as a tree
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).view(1)
    return torch.stack([torch.linalg.vector_norm(block.float()) for block in tensor.flatten().split(_BLOCK)])


def gradient_norm(parameters: list[nn.Parameter], layout: ParallelLayout) -> Tensor:
    """2-norm of the gradient of the whole model, each weight counted once, on every rank."""
    counted = [
        block_norms(p.grad)
        for p in parameters
        if not getattr(p, "ds_pipe_replicated", False)  # a tied weight belongs to the first stage that holds it
        and (is_model_parallel_parameter(p) or layout.tensor_group.rank() == 0)
    ]
    square = torch.cat([torch.zeros(1, device=parameters[0].device), *counted]).square().sum()
    dist.all_reduce(square, group=layout.tensor_group)
    dist.all_reduce(square, group=layout.pipe_group)
    return square.sqrt()


def measure_by_blocks(optimizer: Any) -> None:
    """Let DeepSpeed's ``optimizer`` of ZeRO 1, 2, 3 or of bf16 take gradients' norms from those of their blocks."""
    if hasattr(optimizer, "get_grad_norm_direct"):
        total_norm = optimizer.get_grad_norm_direct

        def norm_of_blocks(gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
            # What is a partition's padding has no parameter; DeepSpeed marks it, and skips it likewise.
            own = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
            return total_norm([block_norms(gradient) for gradient in own], params, norm_type)

        optimizer.get_grad_norm_direct = norm_of_blocks
    elif hasattr(optimizer, "get_grads_for_norm"):
        gradients_of = optimizer.get_grads_for_norm

        def gradients_or_norms(for_clipping: bool = False) -> Any:
            if for_clipping:
                return gradients_of(for_clipping=True)
            shared, of_experts = gradients_of()
            return [block_norms(gradient) for gradient in shared], of_experts

        optimizer.get_grads_for_norm = gradients_or_norms
