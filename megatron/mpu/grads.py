"""Gradient clipping with the interface of Megatron-LM 1."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from .initialize import get_model_parallel_group
from .layers import param_is_not_tensor_parallel_duplicate


def clip_grad_norm(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> float:
    """Clip gradients so that their norm over all ranks of the model is at most ``max_norm``; returns the norm before.

    Weights that are replicated on the tensor-parallel ranks count once.
    """
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    grads = {parameter: parameter.grad for parameter in listed if parameter.grad is not None}
    none = torch.zeros((), device=get_accelerator().current_device_name())
    counted = (grad for parameter, grad in grads.items() if param_is_not_tensor_parallel_duplicate(parameter))
    power = 1.0 if norm_type == math.inf else norm_type
    total = torch.stack([none, *(grad.float().norm(norm_type) for grad in counted)]).norm(norm_type) ** power
    dist.all_reduce(
        total, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, get_model_parallel_group()
    )
    norm = total.item() ** (1 / power)
    for grad in grads.values():
        grad.mul_(min(max_norm / (norm + 1e-6), 1.0))
    return norm
