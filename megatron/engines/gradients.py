"""What DeepSpeed's optimizers do with gradients, where it is replaced: reduction, norm, clipping, loss scale."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from megatron.common.errors import NumericsError
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.shared_memory import SharedMemoryGroup


def clip_by_model_norm(engine: DeepSpeedEngine, layout: ParallelLayout) -> None:
    """In fp32 at ZeRO 0: clip by the norm of the whole model's gradient, store it, skip steps that are not finite.

    DeepSpeed: runtime/engine.py, ``clip_fp32_gradients`` counts a tied weight once for each stage that holds it, omits
    norms and row-parallel biases of all stages but the first, and discards the norm, so that the update depends on
    the layout. ``_take_model_step`` applies any gradient, even if it is not finite.
    Tests: tests/training/test_layouts_agree.py, test_anomaly_detection.py. Remove when fp32 uses the norm of ZeRO.
    """
    optimizer, step = engine.optimizer, engine.optimizer.step

    def clip_and_step(closure: None = None) -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        norm = gradient_norm(parameters, layout)
        engine._global_grad_norm = norm.item()
        optimizer.overflow = not math.isfinite(engine._global_grad_norm)  # what DeepSpeed calls a skipped step
        if optimizer.overflow:
            return
        limit = engine.gradient_clipping()
        if takes_scale(optimizer):
            optimizer.grad_scale = _excess(norm, limit) if limit else None
        else:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit or math.inf, norm)
        step()

    engine.clip_fp32_gradients = lambda: None
    clip_and_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # without this mark torch's scheduler warns
    optimizer.step = clip_and_step


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
        if group.size() > 1:  # even alone, a rank would wait for the thread that communicates
            dist.all_reduce(total, group=group)
    return total


def counted_once(parameters: Iterable[nn.Parameter], layout: ParallelLayout) -> Iterator[nn.Parameter]:
    """Those that this rank contributes to a sum over the tensor-parallel ranks and the stages."""
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


def measure_norm_by_blocks(optimizer: Any) -> None:
    """Let DeepSpeed's optimizers of ZeRO 1, 2, 3 and of bf16 compute the gradient norm from ``block_norms``.

    DeepSpeed: runtime/zero/stage_1_and_2.py and stage3.py, ``get_grad_norm_direct`` casts each gradient to fp64, up to
    a fifth of a step; runtime/bf16_optimizer.py adds squares as torch does, inaccurately. runtime/utils.py,
    ``mask_nan_or_inf_with_val_inplace`` copies -1 from the host, which waits for all that the device has to do.
    Tests: tests/training/test_gradient_norm.py, test_synchronizations.py. Remove when the norm is accurate without a
    copy in fp64, and marked on the device.
    """
    if hasattr(optimizer, "get_grad_norm_direct"):
        stage_1_and_2.mask_nan_or_inf_with_val_inplace = stage3.mask_nan_or_inf_with_val_inplace = _mark_unless_finite
        total_norm = optimizer.get_grad_norm_direct

        def counts(parameter: nn.Parameter) -> bool:
            is_own = is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0
            return is_own and not getattr(parameter, "ds_pipe_replicated", False)

        def norm_of_blocks(gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
            # The padding of a partition has no parameter; DeepSpeed marks it, and skips it likewise.
            if isinstance(gradients, FlatGradients) and all(map(counts, params)):
                return total_norm([block_norms(gradients.flat_partition)], params, norm_type)
            unpadded = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
            return total_norm([block_norms(gradient) for gradient in unpadded], params, norm_type)

        optimizer.get_grad_norm_direct = norm_of_blocks
    elif hasattr(optimizer, "get_grads_for_norm"):
        all_gradients = optimizer.get_grads_for_norm

        def gradients_or_norms(for_clipping: bool = False) -> Any:
            if for_clipping:
                return all_gradients(for_clipping=True)
            shared, of_experts = all_gradients()
            return [block_norms(gradient) for gradient in shared], of_experts

        optimizer.get_grads_for_norm = gradients_or_norms


def _mark_unless_finite(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~norm.isfinite(), val)


def takes_scale(optimizer: Any) -> bool:
    """Whether ``optimizer`` is torch's fused Adam, which divides gradients by its ``grad_scale`` as it reads them."""
    return isinstance(optimizer, torch.optim.Adam) and bool(optimizer.defaults["fused"])


def _excess(norm: Tensor, limit: float) -> Tensor:
    """What a gradient of ``norm`` is divided by to be clipped at ``limit``: at least 1."""
    return ((norm + 1e-6) / limit).clamp(min=1.0)


def clip_within_adam(optimizer: Any) -> None:
    """At ZeRO 1 and 2: let torch's fused Adam clip the gradient, and divide it by the loss scale, as it reads it.

    DeepSpeed: runtime/zero/stage_1_and_2.py, ``unscale_and_clip_grads`` multiplies the gradient in a pass of its own,
    also by 1.
    Test: tests/training/test_gradient_norm.py. Remove when the scale is passed to optimizers that take it.
    """
    has_norm = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.compute_grad_norm
    if not (has_norm and takes_scale(optimizer.optimizer)):
        return

    def pass_scale(gradients: list[Tensor], norm: Tensor) -> None:
        loss_scale, limit = optimizer.loss_scale, optimizer.clip_grad
        norm = norm.masked_fill(norm < 0, torch.inf)  # DeepSpeed's mark of a norm that is not finite
        scale = _excess(norm / loss_scale, limit) if limit else torch.ones((), device=norm.device)
        optimizer.optimizer.grad_scale = scale * loss_scale

    optimizer.unscale_and_clip_grads = pass_scale


def find_overflow_by_norm(optimizer: Any) -> None:
    """At ZeRO 1 and 2: skip a step by the norm of the gradient alone, which is not finite if an element is not.

    DeepSpeed: runtime/zero/stage_1_and_2.py, ``check_overflow`` reads every gradient twice and reduces what it found
    over all ranks; then ``step`` looks at the norm for the same reason.
    Test: tests/training/test_gradient_norm.py. Remove when DeepSpeed checks once.
    """
    if isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.compute_grad_norm and not optimizer.cpu_offload:
        optimizer.check_overflow = lambda partition_gradients=True: None


def keep_gradients_of_one_rank(engine: DeepSpeedEngine, group_size: int) -> None:
    """At ZeRO 1 with one data-parallel rank: copy gradients once, into the fp32 tensor that the optimizer reads.

    DeepSpeed: runtime/zero/stage_1_and_2.py, ``reduce_gradients`` copies them into a bucket, divides by 1, "reduces",
    and copies them out again; ``step`` flattens them, and converts that to fp32. Hooks of each parameter make the
    buckets.
    Test: tests/training/test_gradient_norm.py. Remove when DeepSpeed returns early for one rank.
    """
    optimizer: Any = engine.optimizer
    stage_1 = isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.partition_gradients
    if group_size > 1 or not stage_1 or optimizer.cpu_offload or optimizer.overlap_comm:
        return
    if any(map(any, optimizer.round_robin_bit16_padding)):  # "parameter_alignment"; DeepSpeed counts it among gradients
        return

    def flatten(pipeline_parallel: bool = False) -> None:
        for group in range(len(optimizer.params_in_partition)):
            optimizer.averaged_gradients[group] = FlatGradients(optimizer, group)
        optimizer._clear_param_grad_only()
        optimizer._epilogue_ran_this_backward = True

    optimizer.reduce_gradients, optimizer.setup_buckets = flatten, lambda: None
    if not (optimizer.use_grad_accum_attribute or isinstance(engine, PipelineEngine)):
        for hook in optimizer._grad_acc_hooks:
            hook.remove()


class FlatGradients(list[Tensor]):
    """The gradients of a parameter group, views of ``flat_partition``, by which name DeepSpeed looks for it."""

    def __init__(self, optimizer: Any, group: int):
        flat = torch.empty_like(optimizer.single_partition_of_fp32_groups[group], requires_grad=False)
        self.flat_partition = flat
        parameters = optimizer.params_in_partition[group]
        super().__init__(_unflatten_dense_tensors(flat, parameters))
        gradients = [optimizer.get_gradient_for_reduction(parameter) for parameter in parameters]
        copied = [pair for pair in zip(self, gradients, strict=True) if pair[1] is not None]
        if flat.device.type == "cpu" or not copied:
            for own, gradient in copied:
                own.copy_(gradient)
        else:  # a few kernels: the host would take longer to start one for each than the device to copy
            torch._foreach_copy_([own for own, _ in copied], [gradient for _, gradient in copied])
        for own, gradient in zip(self, gradients, strict=True):
            if gradient is None:
                own.zero_()
        flat[sum(parameter.numel() for parameter in parameters) :].zero_()


def keep_loss_scale_within_step(optimizer: Any) -> None:
    """In fp16: divide the gradient by the loss scale that it was computed with; a scale that doubles does so after.

    DeepSpeed: runtime/zero/stage_1_and_2.py and stage3.py, ``step`` updates the scale first and divides by the new one,
    so that the gradient of every step in which the scale doubles is halved, and at ZeRO 3 its norm as well.
    Test: tests/training/test_fp16.py. Remove when the gradient is divided by the scale before the update.
    """
    if not getattr(optimizer, "dynamic_loss_scale", False):
        return
    update_scale, step = optimizer._update_scale, optimizer.step

    def update_on_overflow(has_overflow: bool = False) -> None:
        if has_overflow:
            update_scale(True)

    def step_and_update(closure: None = None) -> None:
        step()
        if not optimizer.overflow:
            update_scale(False)

    optimizer._update_scale, optimizer.step = update_on_overflow, step_and_update


@contextmanager
def loss_scale_limit_reported() -> Iterator[None]:
    """Raise NumericsError, the same on all ranks, if gradients overflow at the smallest loss scale of fp16.

    DeepSpeed: runtime/fp16/loss_scaler.py, ``update_scale`` raises a bare Exception, known by its text alone.
    Test: tests/training/test_loss_scale.py. Remove when it has a class of its own.
    """
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise NumericsError(
            "gradients overflow even at the smallest loss scale, --min-scale: lower --lr, or use --bf16"
        ) from error


def reduce_to_owners(engine: DeepSpeedEngine) -> None:
    """At ZeRO 1 and 2: send each slice of a gradient to the rank that owns it, and nowhere else.

    DeepSpeed: runtime/zero/stage_1_and_2.py, ``allreduce_and_scatter`` sums a copy of every slice on every rank, and
    all but its owner discard it.
    Test: tests/training/test_layouts_agree.py. Remove when slices are reduced to their owners only.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "allreduce_and_scatter"):
        return
    everywhere = optimizer.allreduce_and_scatter

    def reduce(bucket: Sequence[tuple], communication_data_type: torch.dtype, **options: Any) -> None:
        group = options.get("process_group") or optimizer.dp_process_group
        has_one_owner = not options.get("divide", True) and all(len(owners) == 1 for owners, *_ in bucket)
        if not has_one_owner or not isinstance(group, SharedMemoryGroup) or group.memory is None:
            return everywhere(bucket, communication_data_type, **options)
        dtype = torch.float32 if optimizer.sequence_parallel_size > 1 else communication_data_type
        slices: list[list[Tensor]] = [[] for _ in range(group.size())]
        for (owner,), gradient, _ in bucket:
            slices[owner].append(gradient.to(dtype))
        parts = [joined(of_rank) if of_rank else torch.empty(0, dtype=dtype) for of_rank in slices]
        total = parts[group.rank()]
        dist.reduce_scatter(total, parts, group=group)
        mine = [(gradient, output) for (owner,), gradient, output in bucket if owner == group.rank()]
        for (gradient, output), own in zip(mine, total.split([x.numel() for x in slices[group.rank()]]), strict=True):
            optimizer._add_to_grad_partition_buffer(output, own)
            if own.data_ptr() != gradient.data_ptr():
                gradient.copy_(own)
        return None

    optimizer.allreduce_and_scatter = reduce


def joined(slices: Sequence[Tensor]) -> Tensor:
    """``slices``, each [n], one after the other: without a copy if they are neighbors in memory, as in a bucket."""
    first = slices[0]
    end = first.storage_offset()
    for part in slices:
        is_next = part.storage_offset() == end and part.is_contiguous()
        if not is_next or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(slices))
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))
