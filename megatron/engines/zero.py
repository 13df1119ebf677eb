"""Subclasses of DeepSpeed's ZeRO optimizers with corrections.

DeepSpeed 0.19.8:

- runtime/zero/stage_1_and_2.py and stage3.py, ``get_grad_norm_direct`` casts each gradient to fp64, up to a fifth of a
  step; runtime/bf16_optimizer.py sums squares with torch, inaccurately (see ``block_norms``). runtime/utils.py,
  ``mask_nan_or_inf_with_val_inplace`` copies -1 from the host, which synchronizes with the device.
  Tests: tests/training/test_gradient_norm.py, test_synchronizations.py.
- ``step`` updates the fp16 loss scale first and divides by the new one, so that the gradient of every step in which
  the scale doubles is halved, and at ZeRO 3 its norm as well. Test: tests/training/test_fp16.py.
- ``initialize_optimizer_states`` replaces torch's Adagrad by another one, without the groups of its parameters and
  out of reach of the learning-rate schedule. Test: tests/training/test_optimizers.py.
- stage_1_and_2.py: ``check_overflow`` reads every gradient twice and reduces the result over all ranks, although
  ``step`` then checks the norm anyway. ``step`` waits for the norm before it starts the optimizer, multiplies the
  gradient in a separate pass (also by 1), updates groups sequentially, and waits until all weights are gathered.
  Gradients: see ``megatron.engines.gradients``.
  Tests: tests/training/test_gradient_norm.py, test_synchronizations.py, tests/engines/test_gradients.py.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import deepspeed.runtime.engine
import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from megatron.engines.gradient_norm import block_norms, counted_once, sum_over_model, sums_of_squares
from megatron.engines.gradients import GradientBucket, Gradients, in_type, sum_together
from megatron.engines.optimizers.skipping import clip_divisor, scale_and_skip, takes_scale
from megatron.engines.overrides import expect, overrides, replaced
from megatron.engines.sharded_weights import ShardedWeights
from megatron.engines.state import zero_master_weights
from megatron.engines.status import loss_scale_limit_reported
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.tensor.layers import take_gradient_sums

expect(DeepSpeedZeroOptimizer, "_lazy_init_hp_params_optimizer_state", "(self)")
expect(stage3, "mask_nan_or_inf_with_val_inplace", "(input, device=None, val=-1.0)")


class CorrectedSteps:
    """Mixin: the gradient is divided by the loss scale of its own step, and Adagrad keeps its groups and schedule."""

    dynamic_loss_scale: bool
    overflow: bool
    optimizer: Any

    @overrides(DeepSpeedZeroOptimizer, "(self)")
    def initialize_optimizer_states(self) -> None:
        """Allocate the states, and keep the optimizer whose groups the schedule sets."""
        given = self.optimizer
        super().initialize_optimizer_states()  # type: ignore[misc]
        given.state, self.optimizer = self.optimizer.state, given

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


class _Piece(NamedTuple):
    """Elements ``start`` to ``start + length`` of a flat gradient, which belong to one parameter."""

    start: int
    length: int
    is_counted: bool
    """Whether this rank contributes the piece to the norm."""
    is_summed: bool
    """Whether the piece is summed over the tensor-parallel ranks."""


class Reductions(NamedTuple):
    """How ``BucketedZeroOptimizer`` reduces gradients and gathers weights."""

    layout: ParallelLayout
    positions: Mapping[nn.Parameter, int]
    """Position of each parameter in the model."""
    reduced_last: Set[nn.Parameter]
    """Parameters that get several gradients in a backward pass, or gradients after it."""
    micro_batches: Callable[[], int]
    """Returns the number of micro-batches of the current step."""
    sent_dtype: torch.dtype | None
    """Type in which gradients are sent; None for the accumulation dtype."""
    coalesces: bool
    """Whether ZeRO 2 accumulates gradients of all micro-batches before it reduces them."""
    overlaps: bool
    """Whether gradients are reduced during the backward pass."""
    adds_together: bool
    """Whether one kernel adds several gradients to their buffer."""


class ZeroOptimizer(CorrectedSteps, DeepSpeedZeroOptimizer):
    """The optimizer of ZeRO 1 and 2, with DeepSpeed's own reduction of gradients."""

    skipped: bool | Tensor = False
    """Whether the last step was skipped, because its gradient was not finite."""
    bit16_groups: list[list[nn.Parameter]]

    @overrides(DeepSpeedZeroOptimizer, "(self)")
    def _link_all_hp_params(self) -> None:
        """Link weights with their parts of the flat groups, in the order of the groups.

        DeepSpeed: runtime/zero/stage_1_and_2.py uses the order of the model in spite of round_robin_gradients:
        safe_get_full_grad() fails, or returns the gradient of another weight.
        Test: tests/training/test_measurements.py. Remove when it passes round_robin_bit16_groups.
        """
        model_order = self.bit16_groups
        self.bit16_groups = self.round_robin_bit16_groups
        super()._link_all_hp_params()
        self.bit16_groups = model_order

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The unreduced gradient of ``parameter`` on this rank; ZeRO 1 only."""
        return self.get_param_gradient_attribute(parameter)

    def step(self, closure: None = None) -> None:
        """Update the weights, unless the gradient is not finite."""
        super().step()
        self.skipped = self.overflow


class BucketedZeroOptimizer(ZeroOptimizer):
    """The optimizer of ZeRO 1 and 2, with gradients in ``Gradients``."""

    def __init__(self, *arguments: Any, how: Reductions, **options: Any):
        super().__init__(*arguments, **options)
        self._layout, groups = how.layout, self.bit16_groups
        first_uses = [min(how.positions[parameter] for parameter in group) for group in groups]
        self.weights = ShardedWeights(
            groups,
            self.bit16_groups_flat,
            self.parallel_partitioned_bit16_groups,
            self.real_dp_process_group,
            first_uses,
            how.reduced_last,
        )
        is_sharded = self.partition_gradients and not how.coalesces
        buckets = [self._bucket(number, how, is_sharded=is_sharded) for number in range(len(groups))]
        passes = (lambda: 1) if is_sharded else how.micro_batches
        self.gradients = Gradients(buckets, passes if how.overlaps else None, first_uses)
        self.use_grad_accum_attribute = False  # gradients are in the buckets
        parameters = (parameter for group in groups for parameter in group)
        self._summed_over_tensor_ranks = set(take_gradient_sums(parameters, how.layout.tensor_group))

    def _bucket(self, number: int, how: Reductions, *, is_sharded: bool) -> GradientBucket:
        parameters, summed = self.round_robin_bit16_groups[number], self.gradient_accumulation_dtype
        divisor = self.dp_process_group.size() / self.sequence_parallel_size if self.gradient_average else 1.0
        before = self.gradient_predivide_factor if self.postscale_gradients else divisor
        return GradientBucket(
            parameters,
            self.single_partition_of_fp32_groups[number],
            self.real_dp_process_group[number],
            dtype=summed,
            paddings=self.round_robin_bit16_padding[number],
            sent_dtype=torch.float32 if self.sequence_parallel_size > 1 else how.sent_dtype or summed,
            divisor=divisor / before,
            divisor_before=before,
            scatters=self.reduce_scatter,
            is_sharded=is_sharded,
            is_last=not how.reduced_last.isdisjoint(parameters),
            adds_together=how.adds_together,
        )

    @overrides(DeepSpeedZeroOptimizer, "(self)")
    def create_gradient_handling_hooks(self) -> None:
        """Register none: ``Gradients`` registers its own."""

    @overrides(DeepSpeedZeroOptimizer, "(self, set_to_none=True)")
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.gradients.begin_step()
        self.averaged_gradients.update(dict.fromkeys(self.averaged_gradients))

    @overrides(DeepSpeedZeroOptimizer, "(self, pipeline_parallel=False)")
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Average the gradients of a step (ZeRO 1) or a micro-batch (ZeRO 2) over the data-parallel ranks."""
        self.gradients.reduce()
        # The empty tensor is for ranks with nothing to sum in their parts: all ranks must call the same collectives.
        summed = [self.gradients.parts[0][:0]] if self._summed_over_tensor_ranks else []
        for number, part in enumerate(self.gradients.parts):
            pieces = self._pieces[number]
            averaged = [part[piece.start : piece.start + piece.length] for piece in pieces]
            summed += [gradient for gradient, piece in zip(averaged, pieces, strict=True) if piece.is_summed]
            self.averaged_gradients[number] = averaged  # read by DeepSpeed's ``safe_get_full_grad``
        if self.is_gradient_accumulation_boundary():
            sum_together(summed, self._layout.tensor_group)

    @overrides(DeepSpeedZeroOptimizer, "(self)")
    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """``reduce_gradients`` of ZeRO 2."""
        self.reduce_gradients()

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        return self.gradients.of(parameter)

    @overrides(DeepSpeedZeroOptimizer, "(self, closure=None)")
    def step(self, closure: None = None) -> None:
        """Update the weights, unless the gradient is not finite."""
        parts = in_type(self.gradients.parts, self.master_weights_and_grads_dtype)
        norm = self._norm(parts)
        self._global_grad_norm = norm / self.loss_scale
        divisor = clip_divisor(self._global_grad_norm, self.clip_grad or math.inf) * self.loss_scale
        if takes_scale(self.optimizer):
            self.skipped = scale_and_skip(self.optimizer, norm, divisor)
            if self.dynamic_loss_scale:
                applied, skipped = (_scale_after(self.loss_scaler, overflows) for overflows in (False, True))
                self.external_loss_scale = self.optimizer.found_inf * (skipped - applied) + applied
                self.custom_loss_scaler = True
        else:
            self.skipped = not math.isfinite(norm)
            if self.skipped:
                self._update_scale(True)
                return
            torch._foreach_mul_(parts, divisor.reciprocal())
        for master, part in zip(self.single_partition_of_fp32_groups, parts, strict=True):
            master.grad = part
        self.optimizer.step()
        self._lazy_init_hp_params_optimizer_state()
        for master in self.single_partition_of_fp32_groups:
            master.grad = None
        self.weights.update([master.detach() for master in self.single_partition_of_fp32_groups])
        if self.dynamic_loss_scale and not self.custom_loss_scaler:
            DeepSpeedZeroOptimizer._update_scale(self, False)

    def settle_loss_scale(self, skipped: bool) -> None:
        """Update the loss scale on the host; during the step it was a tensor [] on the device."""
        if self.custom_loss_scaler:
            self.custom_loss_scaler = False
            with loss_scale_limit_reported():
                self.loss_scaler.update_scale(skipped)

    def _norm(self, parts: Sequence[Tensor]) -> Tensor:
        """2-norm [] of the model's gradient, with each weight counted once, from this rank's ``parts``."""
        counted = (
            (is_moe_param(self.bit16_groups[number][0]), piece)
            for number, part in enumerate(parts)
            for piece in self._counted(number, part)
        )
        sums = sums_of_squares(counted, parts[0].device)
        dist.all_reduce(sums[:1], group=self.dp_process_group)
        if self._layout.expert_data_group is not None:
            dist.all_reduce(sums[1:], group=self._layout.expert_data_group)
        return sum_over_model(sums, self._layout).sqrt()

    def _counted(self, number: int, part: Tensor) -> list[Tensor]:
        """The pieces of a group's ``part`` that this rank contributes to the norm."""
        pieces = self._pieces[number]
        if all(piece.is_counted for piece in pieces):
            return [part]
        return [part[piece.start : piece.start + piece.length] for piece in pieces if piece.is_counted]

    @cached_property
    def _pieces(self) -> list[list["_Piece"]]:
        """The pieces of parameters in this rank's part of each parameter group."""
        numbers = {id(master): number for number, master in enumerate(self.single_partition_of_fp32_groups)}
        pieces: list[list[_Piece]] = [[] for _ in numbers]
        for parameter, weight in zero_master_weights(self):
            is_counted = bool(list(counted_once([parameter], self._layout)))
            is_summed = parameter in self._summed_over_tensor_ranks
            pieces[numbers[id(weight.tensor)]].append(_Piece(weight.start, weight.length, is_counted, is_summed))
        return pieces


def _scale_after(scaler: DynamicLossScaler, overflows: bool) -> float:
    """The loss scale that ``scaler`` would have after a step with or without overflow; it is not changed."""
    after = copy(scaler)
    after.raise_error_at_min_scale = False  # the host raises the error once it knows that the step did overflow
    after.update_scale(overflows)
    return after.cur_scale


class Zero3Optimizer(CorrectedSteps, DeepSpeedZeroOptimizer_Stage3):
    """The optimizer of ZeRO 3."""

    @overrides(DeepSpeedZeroOptimizer_Stage3, "(*args, **kwargs)")
    def get_grad_norm_direct(self, gradients: list[Tensor], params: list[nn.Parameter], norm_type: int = 2) -> Tensor:
        """2-norm [] of a parameter group's gradient over all ranks; -1 if it is not finite."""
        return super().get_grad_norm_direct([block_norms(gradient) for gradient in gradients], params, norm_type)


def _mark_unless_finite(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    norm.masked_fill_(~norm.isfinite(), val)


def _has_buckets(options: Mapping[str, Any]) -> bool:
    """Whether gradients are reduced in ``Gradients``, with DeepSpeed's ``options`` of the optimizer.

    Not with CPU offload, and not without a gradient norm, which decides about skipping.
    """
    offload = options["offload_optimizer_config"]
    return options["compute_grad_norm"] and (offload is None or offload.device == "none")


@contextmanager
def corrected_optimizers(how: Reductions) -> Iterator[None]:
    """A context in which DeepSpeed creates the optimizers of this module."""

    def zero_optimizer(*arguments: Any, **options: Any) -> ZeroOptimizer:
        if _has_buckets(options):
            return BucketedZeroOptimizer(*arguments, how=how, **options)
        return ZeroOptimizer(*arguments, **options)

    stage3.mask_nan_or_inf_with_val_inplace = _mark_unless_finite
    with (
        replaced(deepspeed.runtime.engine, DeepSpeedZeroOptimizer=zero_optimizer),
        replaced(stage3, DeepSpeedZeroOptimizer_Stage3=Zero3Optimizer),
    ):
        yield
