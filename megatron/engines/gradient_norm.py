"""The 2-norm of the gradient of the entire model, in which each weight counts once on any layout."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor, nn

from megatron.parallel.layout import ParallelLayout


def gradient_norm(parameters: list[nn.Parameter], layout: ParallelLayout) -> Tensor:
    """2-norm of the gradient of the entire model, with each weight counted once; the same on every rank."""
    counted = counted_once(parameters, layout)
    gradients = ((is_moe_param(one), one.grad) for one in counted if one.grad is not None)
    return sum_over_model(sums_of_squares(gradients, parameters[0].device), layout).sqrt()


def sums_of_squares(gradients: Iterable[tuple[bool, Tensor]], device: torch.device) -> Tensor:
    """Sums [2] of squared elements, in fp32, over gradients (is of experts, gradient): dense ones, and experts'."""
    parts: list[list[Tensor]] = [[], []]
    for is_of_experts, gradient in gradients:
        parts[is_of_experts].append(gradient)
    return torch.stack([_sum_of_squares(part) if part else torch.zeros((), device=device) for part in parts])


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    if tensors[0].device.type == "cpu":
        norms = torch.cat([block_norms(tensor) for tensor in tensors])
    else:
        norms = torch.stack(torch._foreach_norm(tensors, dtype=torch.float32))  # one kernel
    return norms.square().sum()


def sum_over_model(values: Tensor, layout: ParallelLayout) -> Tensor:
    """The sum [] over the ranks of a model replica, on every rank.

    ``values`` [2] are this rank's sums over parameters that are ``counted_once``: first those that are replicated in
    the expert group, then experts.
    """
    if layout.expert_group is not None:
        dist.all_reduce(values[1], group=layout.expert_group)
    total = values.sum()
    if layout.model_group.size() > 1:  # with a single rank, it would needlessly wait for the communication thread
        dist.all_reduce(total, group=layout.model_group)
    return total


def counted_once(parameters: Iterable[nn.Parameter], layout: ParallelLayout) -> Iterator[nn.Parameter]:
    """The parameters that this rank contributes to a sum over tensor-parallel ranks and stages, without duplicates."""
    for parameter in parameters:
        is_replica = getattr(parameter, "ds_pipe_replicated", False)  # a tied weight on other stages than the first
        if not is_replica and (is_model_parallel_parameter(parameter) or layout.tensor_group.rank() == 0):
            yield parameter


_BLOCK = 1 << 16
"""Elements per block: few enough for an accurate sum of squares in fp32."""
_BLOCKS = 16
"""Blocks that are converted at a time, so that they fit into the cache of a core."""


def block_norms(tensor: Tensor) -> Tensor:
    """2-norms in fp32 of blocks of ``tensor``; their 2-norm is the norm of the tensor.

    torch on CPU accumulates squares in fp32 sequentially: for 40 million elements the third digit is wrong.
    """
    if tensor.device.type != "cpu" or tensor.numel() < _BLOCK:  # other devices use tree reductions
        return torch.linalg.vector_norm(tensor, dtype=torch.float32).view(1)
    flat, in_blocks = tensor.flatten(), tensor.numel() // _BLOCK * _BLOCK
    blocks = flat[:in_blocks].view(-1, _BLOCK).split(_BLOCKS)
    norms = [torch.linalg.vector_norm(chunk.float(), dim=1) for chunk in blocks]
    return torch.cat([*norms, torch.linalg.vector_norm(flat[in_blocks:].float()).view(1)])
