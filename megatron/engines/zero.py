"""The norm of the gradient, and DeepSpeed's optimizers of ZeRO 1 to 3 and of bf16 as this suite corrects them.

DeepSpeed 0.19.8:

- runtime/zero/stage_1_and_2.py and stage3.py, ``get_grad_norm_direct`` casts each gradient to fp64, up to a fifth of a
  step; runtime/bf16_optimizer.py adds squares as torch does, inaccurately (see ``block_norms``). runtime/utils.py,
  ``mask_nan_or_inf_with_val_inplace`` copies -1 from the host, which waits for all that the device has to do.
  Tests: tests/training/test_gradient_norm.py, test_synchronizations.py.
- ``step`` updates fp16's loss scale first and divides by the new one, so that the gradient of every step in which the
  scale doubles is halved, and at ZeRO 3 its norm as well. Test: tests/training/test_fp16.py.
- stage_1_and_2.py: ``check_overflow`` reads every gradient twice and reduces the result over all ranks, although
  ``step`` then looks at the norm for the same reason. ``unscale_and_clip_grads`` multiplies the gradient in a separate
  pass, also by 1. With one data-parallel rank ``reduce_gradients`` copies gradients into a bucket, divides by 1,
  "reduces", and copies them out again; ``step`` flattens them, and converts that to fp32.
  Test: tests/training/test_gradient_norm.py.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import deepspeed.runtime.engine
import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from megatron.engines.overrides import expect, overrides, replaced
from megatron.parallel.layout import ParallelLayout

for _module in (stage_1_and_2, stage3):
    expect(_module, "mask_nan_or_inf_with_val_inplace", "(input, device=None, val=-1.0)")
expect(DeepSpeedZeroOptimizer, "get_gradient_for_reduction", "(self, param)")
expect(DeepSpeedZeroOptimizer, "_clear_param_grad_only", "(self)")


def _mark_unless_finite(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~norm.isfinite(), val)


@contextmanager
def corrected_optimizers() -> Iterator[None]:
    """While inside, DeepSpeed's engines make the optimizers of this module."""
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mark_unless_finite
    stage3.mask_nan_or_inf_with_val_inplace = _mark_unless_finite
    ours = {"DeepSpeedZeroOptimizer": ZeroOptimizer, "BF16_Optimizer": Bf16Optimizer}
    with ExitStack() as stack:
        stack.enter_context(replaced(deepspeed.runtime.engine, **ours))
        stack.enter_context(replaced(stage3, DeepSpeedZeroOptimizer_Stage3=Zero3Optimizer))
        yield


class _LossScaleOfStep:
    """Divides the gradient by the loss scale that it was computed with; a scale that doubles does so afterwards."""

    dynamic_loss_scale: bool
    overflow: bool

    @overrides(DeepSpeedZeroOptimizer, "(self, has_overflow=False)")
    def _update_scale(self, has_overflow: bool = False) -> None:
        if has_overflow or not self.dynamic_loss_scale:
            super()._update_scale(has_overflow)  # type: ignore[misc]

    @overrides(DeepSpeedZeroOptimizer, "(self, closure=None)")
    def step(self, closure: None = None) -> None:
        """Update the weights, unless the gradient is not finite."""
        super().step()  # type: ignore[misc]
        if self.dynamic_loss_scale and not self.overflow:
            super()._update_scale(False)  # type: ignore[misc]


class ZeroOptimizer(_LossScaleOfStep, DeepSpeedZeroOptimizer):
    """ZeRO 1 and 2."""

    @overrides(DeepSpeedZeroOptimizer, "(self, gradients, params, norm_type=2)")
    def get_grad_norm_direct(self, gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
        """2-norm [] of a parameter group's gradient over all ranks; -1 if it is not finite."""
        rank = self.model_parallel_rank
        if isinstance(gradients, FlatGradients) and all(_counts(parameter, rank) for parameter in params):
            norms = [block_norms(gradients.flat_partition)]
        else:  # the padding of a partition has no parameter; DeepSpeed marks it, and skips it likewise
            unpadded = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
            norms = [block_norms(gradient) for gradient in unpadded]
        return super().get_grad_norm_direct(norms, params, norm_type)

    @overrides(DeepSpeedZeroOptimizer, "(self, partition_gradients=True)")
    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Leave it to the norm, which is not finite if an element is not."""
        if self.cpu_offload or not self.compute_grad_norm:
            super().check_overflow(partition_gradients)

    @overrides(DeepSpeedZeroOptimizer, "(self, grad_groups_flat, total_norm)")
    def unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: Tensor) -> None:
        """Let torch's fused Adam divide the gradient by the loss scale and clip it as it reads it."""
        if not (self.compute_grad_norm and takes_scale(self.optimizer)):
            super().unscale_and_clip_grads(grad_groups_flat, total_norm)
            return
        norm = total_norm.masked_fill(total_norm < 0, torch.inf)  # DeepSpeed's mark of a norm that is not finite
        limit = self.clip_grad
        scale = clip_divisor(norm / self.loss_scale, limit) if limit else torch.ones((), device=norm.device)
        self.optimizer.grad_scale = scale * self.loss_scale

    @cached_property
    def _copies_gradients_once(self) -> bool:
        """Whether gradients stay on this one rank, and go into the fp32 tensor that the optimizer reads.

        Not with "parameter_alignment", whose padding DeepSpeed counts among gradients.
        """
        is_one_rank = dist.get_world_size(self.dp_process_group) == 1
        is_padded = any(map(any, self.round_robin_bit16_padding))
        return is_one_rank and not (self.partition_gradients or self.cpu_offload or self.overlap_comm or is_padded)

    @overrides(DeepSpeedZeroOptimizer, "(self, pipeline_parallel=False)")
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Average the gradients over the data-parallel ranks."""
        if not self._copies_gradients_once:
            super().reduce_gradients(pipeline_parallel)
            return
        for group in range(len(self.params_in_partition)):
            self.averaged_gradients[group] = FlatGradients(self, group)
        self._clear_param_grad_only()
        self._epilogue_ran_this_backward = True

    @overrides(DeepSpeedZeroOptimizer, "(self)")
    def setup_buckets(self) -> None:
        """Allocate the buckets in which gradients are reduced."""
        if not self._copies_gradients_once:
            super().setup_buckets()

    def remove_unused_hooks(self) -> None:
        """Remove the hooks of each parameter that fill buckets, where none are filled. Not in a pipeline."""
        if self._copies_gradients_once and not self.use_grad_accum_attribute:
            for hook in self._grad_acc_hooks:
                hook.remove()


class Zero3Optimizer(_LossScaleOfStep, DeepSpeedZeroOptimizer_Stage3):
    """ZeRO 3."""

    @overrides(DeepSpeedZeroOptimizer_Stage3, "(*args, **kwargs)")
    def get_grad_norm_direct(self, gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
        """2-norm [] of a parameter group's gradient over all ranks; -1 if it is not finite."""
        return super().get_grad_norm_direct([block_norms(gradient) for gradient in gradients], params, norm_type)


class Bf16Optimizer(BF16_Optimizer):
    """ZeRO 1 in bf16 with sums of gradients in fp32."""

    @overrides(BF16_Optimizer, "(self, for_clipping=False)")
    def get_grads_for_norm(self, for_clipping: bool = False) -> Any:
        """All gradients to clip; or norms in place of the gradients that all ranks share, and those of experts."""
        if for_clipping:
            return super().get_grads_for_norm(for_clipping=True)
        shared, of_experts = super().get_grads_for_norm()
        return [block_norms(gradient) for gradient in shared], of_experts


def takes_scale(optimizer: Any) -> bool:
    """Whether ``optimizer`` is torch's fused Adam, which divides gradients by its ``grad_scale`` as it reads them."""
    return isinstance(optimizer, torch.optim.Adam) and bool(optimizer.defaults["fused"])


def clip_divisor(norm: Tensor, limit: float) -> Tensor:
    """What a gradient of ``norm`` is divided by to be clipped at ``limit``: at least 1."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


class FlatGradients(list[Tensor]):
    """The gradients of a parameter group, views of ``flat_partition``, by which name DeepSpeed looks for it."""

    def __init__(self, optimizer: ZeroOptimizer, group: int):
        flat = torch.zeros_like(optimizer.single_partition_of_fp32_groups[group], requires_grad=False)
        self.flat_partition = flat
        parameters = optimizer.params_in_partition[group]
        super().__init__(_unflatten_dense_tensors(flat, parameters))
        gradients = [optimizer.get_gradient_for_reduction(parameter) for parameter in parameters]
        copied = [pair for pair in zip(self, gradients, strict=True) if pair[1] is not None]
        if copied:  # a few kernels: the host would take longer to start one for each than a GPU to copy
            torch._foreach_copy_([own for own, _ in copied], [gradient for _, gradient in copied])


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
    return (parameter for parameter in parameters if _counts(parameter, layout.tensor_group.rank()))


def _counts(parameter: nn.Parameter, tensor_rank: int) -> bool:
    is_replica = getattr(parameter, "ds_pipe_replicated", False)  # the first stage that holds a tied weight has it
    return not is_replica and (is_model_parallel_parameter(parameter) or tensor_rank == 0)


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
