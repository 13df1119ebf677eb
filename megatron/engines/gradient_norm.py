"""The 2-norm of the gradient of the whole model, which does not depend on the layout."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn

from megatron.parallel.layout import ParallelLayout


def gradient_norm(parameters: list[nn.Parameter], layout: ParallelLayout) -> Tensor:
    """2-norm of the gradient of the whole model, each weight counted once, on every rank."""
    device = parameters[0].device
    norms: list[list[Tensor]] = [[torch.zeros(1, device=device)], [torch.zeros(1, device=device)]]
    for parameter in counted_once(parameters, layout):
        if parameter.grad is not None:
            norms[is_moe_param(parameter)].append(block_norms(parameter.grad))
    return sum_over_model(torch.stack([torch.cat(some).square().sum() for some in norms]), layout).sqrt()


def sum_over_model(values: Tensor, layout: ParallelLayout) -> Tensor:
    """The sum [] over the ranks that share a replica of the model, on every rank.

    ``values`` [2] are sums over this rank's parameters that are ``counted_once``: of those that all ranks of an expert
    group hold, and of the experts that are divided over them.
    """
    if layout.expert_group is not None:
        dist.all_reduce(values[1], group=layout.expert_group)
    total = values.sum()
    for group in (layout.tensor_group, layout.pipe_group):
        if group.size() > 1:  # with itself, a rank would wait for the thread that communicates
            dist.all_reduce(total, group=group)
    return total


def counted_once(parameters: Iterable[nn.Parameter], layout: ParallelLayout) -> Iterator[nn.Parameter]:
    """The parameters that this rank contributes to a sum over the tensor-parallel ranks and the stages."""
    for parameter in parameters:
        is_replica = getattr(parameter, "ds_pipe_replicated", False)  # the first stage that holds a tied weight has it
        if not is_replica and (is_model_parallel_parameter(parameter) or layout.tensor_group.rank() == 0):
            yield parameter


_BLOCK = 1 << 16
"""Elements of a block, few enough for an accurate sum of squares in fp32."""
_BLOCKS = 16
"""Blocks that are converted together, and fit a core's cache."""


def block_norms(tensor: Tensor) -> Tensor:
    """2-norms in fp32 of blocks of ``tensor``. The norm of the result is the norm of the tensor.

    torch on CPU adds squares in fp32 one by one: for 40 million elements the third digit of the norm is wrong.
    """
    if tensor.device.type != "cpu" or tensor.numel() < _BLOCK:  # other devices add in a tree
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).view(1)
    flat, in_blocks = tensor.flatten(), tensor.numel() // _BLOCK * _BLOCK
    blocks = flat[:in_blocks].view(-1, _BLOCK).split(_BLOCKS)
    norms = [torch.linalg.vector_norm(some.float(), dim=1) for some in blocks]
    return torch.cat([*norms, torch.linalg.vector_norm(flat[in_blocks:].float()).view(1)])
