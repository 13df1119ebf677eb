"""``Engine``: the base class of both engines, with corrections of DeepSpeed's; runs a training step or an evaluation.

Each overriding method says what DeepSpeed 0.19.8 does instead, and which test covers it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron.common.checkpoint_folders import existing_rank_file
from megatron.config import RunConfig
from megatron.config.training import LR_MULTIPLIER
from megatron.data.loader import Batch
from megatron.engines import continue_without_reports, reports_optional
from megatron.engines.gradient_norm import gradient_norm
from megatron.engines.gradients import sum_together
from megatron.engines.optimizers.muon import Muon
from megatron.engines.optimizers.skipping import clip_divisor, scale_and_skip, takes_scale
from megatron.engines.overrides import overrides, replaced
from megatron.engines.state import accept_any_adam, master_weights
from megatron.engines.status import HostCopy, StepStatus, loss_scale_limit_reported
from megatron.engines.zero import BucketedZeroOptimizer, Reductions, corrected_optimizers
from megatron.model.moe import ParallelMoE, routers
from megatron.ops.fp8 import fp8_layers
from megatron.parallel.expert import group_name
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook
from megatron.parallel.tensor.layers import take_gradient_sums


class Engine(DeepSpeedEngine):
    """Base class of both engines. The ``hooks`` are called for each instruction of a step."""

    hooks: Sequence[InstructionHook] = ()
    step_learning_rate: float
    """Learning rate of the last step."""
    skipped_before: int
    """Number of skipped steps before the last step."""
    step_outcome: HostCopy
    """"skipped": whether the last step was skipped; "loss_scale": the loss scale after it."""
    _is_settled = True
    _summed_over_tensor_ranks: Sequence[nn.Parameter] = ()
    mean_loss_parts: Mapping[str, Tensor]
    """Terms of the loss of the last global batch by name, [] each, averaged like the loss."""

    def __init__(self, *arguments: Any, run: RunConfig, layout: ParallelLayout, **options: Any):
        self.layout, self._run = layout, run
        self._data_group = layout.get_sequence_data_parallel_group()
        with reports_optional():
            super().__init__(*arguments, **options)
        self.routers = routers(self.module)
        self._fp8_layers = fp8_layers(self.module)
        for _, kernel in self._fp8_layers:
            kernel.keeps_weights = run.zero.zero_stage < 3  # ZeRO 3 gathers weights for each call
        continue_without_reports(self)
        if isinstance(self.optimizer, BucketedZeroOptimizer) and run.overlaps_param_gather:
            self.optimizer.weights.gather_before(
                layer for name, layer in self.module.named_children() if name.isdigit()
            )

    def inside_hooks(self, instruction: Instruction) -> AbstractContextManager:
        """A context that runs all ``hooks`` for ``instruction``."""
        stack = ExitStack()
        for hook in self.hooks:
            stack.enter_context(hook(instruction))
        return stack

    def moved(self, batch: Batch) -> Batch:
        """``batch`` on the device of this rank; tensors already there are not copied."""
        tokens, targets = batch
        inputs = tokens.to(self.device) if isinstance(tokens, Tensor) else tuple(x.to(self.device) for x in tokens)
        return Batch(inputs, tuple(target.to(self.device) for target in targets))

    @overrides(DeepSpeedEngine, "(self, model)")
    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Make DeepSpeed recognize MoE layers, and reduce their gradients over the ranks with the same experts.

        DeepSpeed recognizes only its own MoE class, which drops tokens depending on the batch of each rank and fails
        with tensor parallelism on gloo; the groups of utils/groups.py do not support pipeline stages.
        Test: tests/training/test_moe_layouts_agree.py.
        """
        layout = self.layout
        if layout.expert_group is None or layout.expert_data_group is None:
            super()._configure_distributed_model(model)
            return
        name = group_name(layout.expert_group.size())
        for known, group in (
            (groups._EXPERT_PARALLEL_GROUP, layout.expert_group),
            (groups._EXPERT_DATA_PARALLEL_GROUP, layout.expert_data_group),
        ):
            known.clear()
            known[name] = group
        with replaced(deepspeed.runtime.engine, MoE=ParallelMoE):
            super()._configure_distributed_model(model)

    @overrides(DeepSpeedEngine, "(self, client_optimizer, model_parameters)")
    def _configure_optimizer(self, client_optimizer: Optimizer | None, model_parameters: Any) -> None:
        """Use the ZeRO optimizers of ``megatron.engines.zero``."""
        how = Reductions(
            layout=self.layout,
            positions={parameter: position for position, parameter in enumerate(self.module.parameters())},
            reduced_last=self._reduced_last(),
            micro_batches=self.gradient_accumulation_steps,
            sent_dtype=self._config.communication_data_type,
            coalesces=self._run.coalesces_grad_reduction,
            overlaps=self._run.overlaps_grad_reduce,
            adds_together=not self._run.model.gradient_accumulation_fusion,
        )
        with corrected_optimizers(how):
            super()._configure_optimizer(client_optimizer, model_parameters)
        keeps_hooks = isinstance(self.optimizer, ZeROOptimizer)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad and not keeps_hooks]
        self._summed_over_tensor_ranks = take_gradient_sums(trained, self.layout.tensor_group)
        accept_any_adam(self.basic_optimizer)
        if isinstance(self.basic_optimizer, Muon) and self.zero_optimization():
            self.basic_optimizer.use_partitions(master_weights(self))

    @overrides(DeepSpeedEngine, "(self, optimizer)")
    def _configure_bf16_optimizer(self, optimizer: Optimizer) -> Any:
        """Use the ZeRO optimizer also for ZeRO 1 in bf16 with fp32 gradient accumulation.

        DeepSpeed's BF16_Optimizer all-reduces gradients in bf16 after the backward pass, waits for their norm before
        the optimizer starts, and does not shard gradients. Test: tests/engines/test_gradients.py.
        """
        return self._configure_zero_optimizer(optimizer)

    def _reduced_last(self) -> set[nn.Parameter]:
        """Tied parameters, whose gradients are complete only after the backward pass.

        They get several gradients per micro-batch; in a stage with both ends of the model even in separate passes.
        """
        counts = Counter(parameter for _, parameter in self.module.named_parameters(remove_duplicate=False))
        tied = getattr(self.module, "tied_modules", nn.ModuleDict())
        return {parameter for parameter, count in counts.items() if count > 1} | set(tied.parameters())

    @overrides(DeepSpeedEngine, "(self, lr_kwargs)")
    def _take_model_step(self, lr_kwargs: dict | None) -> None:
        """Update the weights unless the gradient is not finite; with a GPU the host learns the outcome later.

        DeepSpeed reads the norm before it starts the optimizer, so that the GPU idles. In fp32 at ZeRO 0 it applies
        non-finite gradients; its ``clip_fp32_gradients`` counts a tied weight once for each stage that holds it, omits
        norms and row-parallel biases of all stages but the first, and discards the norm, so that the update depends on
        the layout.
        Tests: tests/training/test_layouts_agree.py, test_anomaly_detection.py, test_synchronizations.py.
        """
        self.settle()
        multiplier = self.optimizer.param_groups[0].get(LR_MULTIPLIER, 1)
        self.step_learning_rate, self.skipped_before = self.get_lr()[0] / multiplier, self.skipped_steps
        with replaced(self, lr_scheduler=None):
            if self.zero_optimization():
                super()._take_model_step(lr_kwargs)
                skipped = getattr(self.optimizer, "skipped", not self._step_applied)
            else:
                skipped = self._clip_or_skip()
                with replaced(self.optimizer, step=lambda: None) if skipped is True else nullcontext():
                    super()._take_model_step(lr_kwargs)
        self.skipped_steps -= not self._step_applied  # ``settle`` counts them
        self.step_outcome = HostCopy({"skipped": skipped, "loss_scale": _loss_scale(self)})
        self._is_settled = False
        self.weights_changed()
        if self.step_outcome.has_arrived:
            self._learn_outcome()

    def settle(self) -> None:
        """Complete the last step: wait for its weights, and advance the learning rate unless it was skipped."""
        self.wait_for_weights()
        if not self._is_settled:
            self._learn_outcome()

    def _learn_outcome(self) -> None:
        """Let the host know whether the last step was skipped, which it may have to wait for."""
        self._is_settled = True
        skipped = bool(self.step_outcome.read()["skipped"])
        if isinstance(self.optimizer, BucketedZeroOptimizer):
            self.optimizer.settle_loss_scale(skipped)
        if skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def weights_changed(self) -> None:
        """Drop cached FP8 copies of trained weights, after a step or after loading a checkpoint."""
        for layer, kernel in self._fp8_layers:
            if layer.weight.requires_grad:
                kernel.forget()

    def wait_for_weights(self) -> None:
        """Wait for the all-gather of updated weights, before anything other than a forward pass uses them."""
        if isinstance(self.optimizer, BucketedZeroOptimizer):
            self.optimizer.weights.wait()

    def _clip_or_skip(self) -> bool | Tensor:
        """Clip the gradient of the entire model, in fp32 at ZeRO 0. Returns whether the step is to be skipped.

        If the optimizer ``takes_scale``, clipping and skipping happen on the device.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        self._global_grad_norm = norm = gradient_norm(parameters, self.layout)
        limit = self.gradient_clipping() or math.inf
        if takes_scale(self.optimizer):
            return scale_and_skip(self.optimizer, norm, clip_divisor(norm, limit))
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return not math.isfinite(norm)

    @overrides(DeepSpeedEngine, "(self)")
    def clip_fp32_gradients(self) -> None:
        """Do nothing: ``_take_model_step`` has clipped the gradients already."""

    @overrides(DeepSpeedEngine, "(self, grads=None, elements_per_buffer=500000000)")
    def buffered_allreduce_fallback(self, grads: Any = None, elements_per_buffer: int = 500_000_000) -> None:
        """Reduce gradients; with a single data-parallel rank skip the useless copy into a buffer and back.

        Gradients to be summed over the tensor-parallel ranks are summed here, once per step.
        """
        if self._data_group.size() > 1:
            super().buffered_allreduce_fallback(grads, elements_per_buffer)
        summed = self._summed_over_tensor_ranks
        gradients = [parameter.grad for parameter in summed if parameter.grad is not None]
        sum_together(gradients, self.layout.tensor_group)

    @overrides(DeepSpeedEngine, "(self, train_batch_size)")
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch size of the next steps and evaluations; the micro-batch size stays.

        DeepSpeed does not reset its count of micro-batches, which determines the last one of a step.
        Test: tests/training/test_ramp_up.py.
        """
        if self.train_batch_size() != train_batch_size:
            super().set_train_batch_size(train_batch_size)
            self.micro_steps = 0

    @overrides(DeepSpeedEngine, "(self, checkpoints_path, tag)")
    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        """This rank's own file for each rank: DeepSpeed only reads the first one, to compare the number of ranks.

        Test: tests/checkpoint/test_folders.py.
        """
        return [str(existing_rank_file(Path(self._get_ckpt_name(checkpoints_path, tag))))] * self.mp_world_size

    @overrides(DeepSpeedEngine, "(self)")
    def flops_profiler_module_depth(self) -> int:
        """Limit the depth to the model's: DeepSpeed raises KeyError beyond. Test: tests/training/test_metrics.py."""
        levels = 1 + max(name.count(".") + bool(name) for name, _ in self.module.named_modules())
        return min(super().flops_profiler_module_depth(), levels)

    @overrides(DeepSpeedEngine, "(self, save_path)")
    def _copy_recovery_script(self, save_path: str) -> None:
        """Do nothing: DeepSpeed copies a script that unpickles checkpoints into the folder, following any symlink.

        Test: tests/checkpoint/test_saving.py.
        """


def train_batch(engine: Engine, batches: Iterator[Batch] | None, hooks: Sequence[InstructionHook] = ()) -> Tensor:
    """Run one optimizer step over a global batch. Returns its loss, the same on every rank.

    Raises NumericsError if gradients overflow at the smallest loss scale of fp16.
    """
    for router in engine.routers:
        router.begin_step(_loss_scale(engine) / engine.gradient_accumulation_steps())
    with loss_scale_limit_reported(), replaced(engine, hooks=hooks):
        return engine.train_batch(batches)


@torch.no_grad()
def eval_batch(engine: Engine, batches: Iterator[Batch] | None, hooks: Sequence[InstructionHook] = ()) -> Tensor:
    """The loss of a global batch, the same on every rank, without an optimizer step."""
    with replaced(engine, hooks=hooks):
        return engine.eval_batch(batches)


def step_status(engine: Engine) -> StepStatus:
    """The status of the step that ``engine`` has just run."""
    return StepStatus(
        outcome=engine.step_outcome,
        learning_rate=engine.step_learning_rate,
        grad_norm=engine.get_global_grad_norm(),
        skipped_before=engine.skipped_before,
        loss_parts=engine.mean_loss_parts,
    )


def _loss_scale(engine: Engine) -> float | Tensor:
    return getattr(engine.optimizer, "loss_scale", 1.0)
