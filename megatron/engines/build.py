"""Build and run DeepSpeed's two engines, the plain one and the pipeline engine. Only this module distinguishes them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from megatron.config import OptimConfig, RunConfig, TrainConfig
from megatron.config.memory import DEFAULT_REDUCE_BUCKET
from megatron.data.loader import Batch
from megatron.engines.chunks import ChunkedPipelineModule
from megatron.engines.compiler import import_compiler_late
from megatron.engines.containers import (
    ChunkedModel,
    DualPipeVModel,
    Layers,
    PipelinedModel,
    SequentialModel,
    build_layers,
    loss_parts,
)
from megatron.engines.engine import (
    continue_without_reports,
    differentiate_outputs_together,
    grad_reduction_coalesced,
    inside_hooks,
    instruction_hooks,
    reduce_fp32_sums_of_tied_weights,
    skip_reduction_of_one_rank,
    start_backward_timers_once,
)
from megatron.engines.experts import experts_recognized
from megatron.engines.gradients import (
    clip_by_model_norm,
    clip_within_adam,
    find_overflow_by_norm,
    keep_gradients_of_one_rank,
    keep_loss_scale_within_step,
    loss_scale_limit_reported,
    measure_norm_by_blocks,
    reduce_to_owners,
)
from megatron.engines.optimizers import client_optimizer, parameter_groups
from megatron.engines.optimizers.muon import Muon
from megatron.engines.schedules import scheduled_pipeline_engine
from megatron.engines.sends import send_without_waiting
from megatron.engines.state import accept_any_adam, master_weights
from megatron.model.architectures import architecture_of
from megatron.model.loss import LossFn
from megatron.model.moe import ParallelMoE
from megatron.model.partition import layers_per_chunk, partition_boundaries
from megatron.model.router import routers
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import Instruction, InstructionHook, schedule_of
from megatron.parallel.tensor.linear import accumulate_in_place
from megatron.parallel.tensor.lora import train_adapters_only
from megatron.training.learning_rates import AnnealingLR


@dataclass(frozen=True)
class StepStatus:
    """What an engine reports after a step."""

    applied: bool
    """Whether the weights were updated; they are not if the gradient was not finite."""
    grad_norm: float | Tensor | None
    """2-norm of the whole model's gradient, [] or a number, before clipping; None if the step was skipped."""
    loss_scale: float
    skipped_iterations: int
    """Iterations since the start of training whose gradients were not finite."""
    loss_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """The terms of the loss by name, [], averaged like the loss; none if the loss has a single one."""


def build_engine(run: RunConfig, layout: ParallelLayout) -> DeepSpeedEngine:
    """The engine that ``run.parallel`` requires, with the model, its optimizer and its learning-rate schedule."""
    import_compiler_late()
    ds_config = dict(run.ds_config)
    if run.activation.checkpoint_activations:
        deepspeed.checkpointing.configure(layout, deepspeed_config=ds_config)
    if run.parallel.samples_counted > 1:
        ds_config["train_batch_size"] = run.train.global_batch_size * run.parallel.samples_counted
    module = build_module(run, layout)
    if run.model.lora_rank:
        train_adapters_only(module)
    if run.model.gradient_accumulation_fusion:
        for weight in module.parameters():
            accumulate_in_place(weight)
    groups = parameter_groups(module, run)
    if run.zero.zero_stage > 0:
        ds_config = _with_bucket_of_model(ds_config, module)
    optimizer = client_optimizer(run, module, groups, layout)
    if optimizer is not None:
        del ds_config["optimizer"]
    scheduled = scheduled_pipeline_engine() if isinstance(module, ChunkedPipelineModule) else nullcontext()
    with scheduled, experts_recognized(ParallelMoE, layout):
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=groups,
            optimizer=optimizer,
            config=ds_config,
            lr_scheduler=partial(annealing_lr, optim=run.optim, train=run.train, override=run.checkpoint.override),
            mpu=None if run.parallel.uses_pipeline else layout,  # the pipeline engine makes its own
        )
    accept_any_adam(engine.basic_optimizer)
    if isinstance(optimizer, Muon) and run.zero.zero_stage > 0:
        optimizer.use_partitions(master_weights(engine))
    ranks = layout.get_sequence_data_parallel_group().size()
    skip_reduction_of_one_rank(engine, ranks)
    reduce_fp32_sums_of_tied_weights(engine)
    start_backward_timers_once(engine)
    if architecture_of(run.model).is_encoder_decoder and not run.parallel.uses_scheduled_engine:
        differentiate_outputs_together(engine)
    if run.parallel.uses_pipeline and not (run.parallel.uses_scheduled_engine or run.parallel.uses_dualpipev):
        send_without_waiting(engine)
    continue_without_reports(engine)
    engine.coalesces_grad_reduction = run.coalesces_grad_reduction
    engine.routers = routers(module)
    if run.zero.zero_stage == 0:
        clip_by_model_norm(engine, layout)
    else:
        reduce_to_owners(engine)
        measure_norm_by_blocks(engine.optimizer)
        keep_loss_scale_within_step(engine.optimizer)
        keep_gradients_of_one_rank(engine, ranks)
        find_overflow_by_norm(engine.optimizer)
        clip_within_adam(engine.optimizer)
    return engine


def build_module(run: RunConfig, layout: ParallelLayout) -> nn.Module:
    """This rank's part of the model, in the container that its engine runs."""
    architecture = architecture_of(run.model)
    provider = architecture.provider

    def layers_and_loss() -> tuple[Layers, LossFn]:
        if provider is not None:
            return provider.layers(run, layout)
        layers = build_layers(architecture.layers(run.model), run.model, layout)
        return layers, architecture.build_loss(run.model, layout)

    if run.parallel.uses_pipeline:
        layers, loss_fn = layers_and_loss()
        boundaries = partition_boundaries(layers_per_chunk(run), run.model)
        if run.parallel.uses_scheduled_engine:
            return ChunkedModel(
                layers, loss_fn, run.activation, layout, partition_boundaries=boundaries, schedule=schedule_of(run)
            )
        container = DualPipeVModel if run.parallel.uses_dualpipev else PipelinedModel
        return container(layers, loss_fn, run.activation, layout, partition_boundaries=boundaries)
    with deepspeed.zero.Init(
        data_parallel_group=layout.get_sequence_data_parallel_group(),
        config_dict_or_path=dict(run.ds_config),
        mpu=layout,
        enabled=run.zero.zero_stage == 3,
    ):
        if provider is not None:
            return provider.module(run, layout)
        return SequentialModel(*layers_and_loss(), run.activation)


def _with_bucket_of_model(ds_config: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """``ds_config`` with a bucket for the reduction of gradients that is no larger than the model.

    DeepSpeed allocates all of it, and on the CPU maps that much memory anew in every step.
    """
    zero = ds_config["zero_optimization"]
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    bucket = min(int(zero.get("reduce_bucket_size", DEFAULT_REDUCE_BUCKET)), elements)
    return ds_config | {"zero_optimization": {**zero, "reduce_bucket_size": bucket}}


def annealing_lr(
    optimizer: torch.optim.Optimizer, *, optim: OptimConfig, train: TrainConfig, override: bool = False
) -> AnnealingLR:
    """The schedule of the learning-rate flags; with ``override`` it replaces that of a loaded checkpoint.

    It is a function of the iteration, or of the consumed samples if the batch size varies.
    """
    return AnnealingLR(
        optimizer,
        start_lr=optim.lr,
        warmup_iter=optim.warmup_steps(train),
        total_iters=optim.decay_steps(train),
        decay_style=optim.lr_decay_style,
        last_iter=0,
        min_lr=optim.min_lr,
        use_checkpoint_lr_scheduler=optim.use_checkpoint_lr_scheduler,
        override_lr_scheduler=optim.override_lr_scheduler or (override and not optim.use_checkpoint_lr_scheduler),
        wsd_decay_iters=optim.wsd_decay_steps(train),
        wsd_decay_style=optim.lr_wsd_decay_style,
        position=train.consumed_samples if train.batches.varies else None,
    )


def train_batch(
    engine: DeepSpeedEngine, batches: Iterator[Batch] | None, hooks: Sequence[InstructionHook] = ()
) -> Tensor:
    """Run one optimizer step over a global batch. Returns its loss, the same on every rank.

    Raises NumericsError if gradients overflow at the smallest loss scale of fp16.
    """
    for router in engine.routers:
        router.begin_step(float(getattr(engine.optimizer, "loss_scale", 1.0)) / engine.gradient_accumulation_steps())
    with loss_scale_limit_reported(), instruction_hooks(engine, hooks):
        if isinstance(engine, PipelineEngine):
            return engine.train_batch(batches)
        assert batches is not None
        engine.train()
        loss, *parts = _mean_over_ranks(_train_micro_batches(engine, batches, hooks), engine)
        engine.module.mean_loss_parts = dict(zip(loss_parts(engine.module), parts, strict=True))
        return loss


@torch.no_grad()
def eval_batch(
    engine: DeepSpeedEngine, batches: Iterator[Batch] | None, hooks: Sequence[InstructionHook] = ()
) -> Tensor:
    """The loss of a global batch, the same on every rank, without an optimizer step."""
    if isinstance(engine, PipelineEngine):
        with instruction_hooks(engine, hooks):
            return engine.eval_batch(batches)
    assert batches is not None
    engine.eval()
    losses = [_forward(engine, next(batches)).view(1) for _ in range(engine.gradient_accumulation_steps())]
    return _mean_over_ranks(losses, engine)[0]


def step_status(engine: DeepSpeedEngine) -> StepStatus:
    """The status of the step that ``engine`` has just run."""
    applied, norm = engine.was_step_applied(), engine.get_global_grad_norm()
    has_stages = isinstance(engine, PipelineEngine)
    return StepStatus(
        applied=applied,
        grad_norm=norm if applied else None,
        loss_scale=float(getattr(engine.optimizer, "loss_scale", 1.0)),
        skipped_iterations=engine.skipped_steps,
        loss_parts=(engine.get_additional_losses() or {}) if has_stages else engine.module.mean_loss_parts,
    )


def _train_micro_batches(
    engine: DeepSpeedEngine, batches: Iterator[Batch], hooks: Sequence[InstructionHook]
) -> list[Tensor]:
    """Run the micro-batches of a step of the plain engine, and the step. Returns each one's losses, [1 + terms]."""
    numbers = range(1, engine.gradient_accumulation_steps() + 1)
    if engine.coalesces_grad_reduction:
        with grad_reduction_coalesced(engine):
            losses = [_forward_and_backward(engine, batches, hooks, number) for number in numbers]
        _step(engine, hooks, numbers[-1])
        return losses
    losses = []
    for number in numbers:
        losses.append(_forward_and_backward(engine, batches, hooks, number))
        _step(engine, hooks, number)
    return losses


def _forward_and_backward(
    engine: DeepSpeedEngine, batches: Iterator[Batch], hooks: Sequence[InstructionHook], number: int
) -> Tensor:
    """Run a micro-batch. Returns its loss and the terms of it, [1 + terms]."""
    with inside_hooks(hooks, Instruction("LoadMicroBatch", number)):
        batch = next(batches)
    with inside_hooks(hooks, Instruction("ForwardPass", number)):
        loss = _forward(engine, batch)
    with inside_hooks(hooks, Instruction("BackwardPass", number)):
        engine.backward(loss)
    return torch.stack([loss.detach(), *loss_parts(engine.module).values()])


def _step(engine: DeepSpeedEngine, hooks: Sequence[InstructionHook], number: int) -> None:
    """End micro-batch ``number``; the last one of a step updates the weights."""
    with inside_hooks(hooks, Instruction("OptimizerStep", number)):
        engine.step()


def _forward(engine: DeepSpeedEngine, batch: Batch) -> Tensor:
    targets = tuple(target.to(engine.device) for target in batch.targets)
    return engine(batch.tokens.to(engine.device), targets)


def _mean_over_ranks(losses: list[Tensor], engine: DeepSpeedEngine) -> Tensor:
    """The mean over micro-batches and ranks of each of their values, [n], in one all-reduce."""
    group = engine.mpu.get_sequence_data_parallel_group()
    mean = torch.stack(losses).mean(dim=0)
    if group.size() > 1:
        dist.all_reduce(mean, group=group)
    return mean / group.size()
