"""The only file that knows there are two DeepSpeed engines, the plain one and the pipeline's."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BufferOpInstruction, PipeInstruction, ReduceGrads
from torch import Tensor, nn

from megatron.config import ModelConfig, OptimConfig, RunConfig, TrainConfig
from megatron.config.errors import NumericsError
from megatron.data.loader import Batch
from megatron.model.architectures import architecture_of
from megatron.model.containers import DualPipeVModel, PipelinedModel, SequentialModel
from megatron.model.kernels import uses_apex
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.partition import layers_per_chunk, partition_boundaries
from megatron.parallel.pipeline.schedule import Instruction
from megatron.parallel.tensor.layers import accumulate_in_place
from megatron.training.gradient_norm import gradient_norm, measure_by_blocks
from megatron.training.learning_rates import AnnealingLR

Listener = Callable[[Instruction], AbstractContextManager]
"""Hears of each instruction before it runs; it runs inside of what the listener returns."""


@dataclass(frozen=True)
class StepStatus:
    """What an engine says behind a step."""

    applied: bool
    """Whether it changed the weights; not where the gradient was not finite."""
    grad_norm: float | None
    """2-norm of the whole model's gradient, before clipping; None where the step was skipped."""
    loss_scale: float
    skipped_iterations: int
    """Iterations since the beginning whose gradients were not finite."""


def build_engine(run: RunConfig, layout: ParallelLayout) -> DeepSpeedEngine:
    """The model, its optimizer and its schedule in the engine that ``run.parallel`` asks for."""
    ds_config = dict(run.ds_config)
    deepspeed.checkpointing.configure(layout, deepspeed_config=ds_config)
    module = build_module(run, layout)
    if run.model.gradient_accumulation_fusion:
        for weight in module.parameters():
            accumulate_in_place(weight)
    groups = weight_decay_groups(module, run.model)
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=groups,
        optimizer=_apex_adam(run, groups),
        config=ds_config,
        lr_scheduler=partial(annealing_lr, optim=run.optim, train=run.train, override=run.checkpoint.override),
        mpu=None if run.parallel.uses_pipeline else layout,  # the pipeline engine brings its own grid
    )
    if layout.get_sequence_data_parallel_group().size() == 1:
        engine.buffered_allreduce_fallback = _reduce_nothing
    if run.precision.dtype == "fp32" and run.zero.zero_stage == 0:
        _step_by_true_norm(engine, layout)
    else:
        measure_by_blocks(engine.optimizer)
    return engine


def build_module(run: RunConfig, layout: ParallelLayout) -> nn.Module:
    """This rank's part of the model, in the container that its engine runs."""
    architecture = architecture_of(run.model)
    layers, loss_fn = architecture.build_layers(run.model, layout), architecture.build_loss(run.model, layout)
    if run.parallel.uses_pipeline:
        container = DualPipeVModel if run.parallel.uses_dualpipev else PipelinedModel
        return container(
            layers,
            loss_fn,
            run.activation,
            layout,
            partition_boundaries=partition_boundaries(layers_per_chunk(run), run.model),
        )
    with deepspeed.zero.Init(
        data_parallel_group=layout.get_sequence_data_parallel_group(),
        config_dict_or_path=dict(run.ds_config),
        mpu=layout,
        enabled=run.zero.zero_stage == 3,
    ):
        return SequentialModel(layers, loss_fn, run.activation)


def weight_decay_groups(module: nn.Module, model: ModelConfig) -> list[dict[str, Any]]:
    """The parameters of ``module`` that decay and those that do not, by the spec of ``model``."""
    specs = architecture_of(model).named_parameters(model)
    parameters = [(specs[name].weight_decay, parameter) for name, parameter in module.named_parameters()]
    return [
        {"params": [parameter for decays, parameter in parameters if decays]},
        {"params": [parameter for decays, parameter in parameters if not decays], "weight_decay": 0.0},
    ]


def annealing_lr(
    optimizer: torch.optim.Optimizer, *, optim: OptimConfig, train: TrainConfig, override: bool = False
) -> AnnealingLR:
    """The schedule that the learning-rate flags describe; with ``override`` they win over a checkpoint's."""
    return AnnealingLR(
        optimizer,
        start_lr=optim.lr,
        warmup_iter=optim.warmup_iters(train),
        total_iters=optim.decay_iters(train),
        decay_style=optim.lr_decay_style,
        last_iter=0,
        min_lr=optim.min_lr,
        use_checkpoint_lr_scheduler=optim.use_checkpoint_lr_scheduler,
        override_lr_scheduler=optim.override_lr_scheduler or (override and not optim.use_checkpoint_lr_scheduler),
        wsd_decay_iters=optim.lr_wsd_decay_iters,
        wsd_decay_style=optim.lr_wsd_decay_style,
    )


def train_batch(engine: DeepSpeedEngine, batches: Iterator[Batch], listeners: Sequence[Listener] = ()) -> Tensor:
    """One optimizer step over a global batch; its loss, the same on every rank.

    Raises NumericsError where gradients overflow at fp16's smallest loss scale.
    """
    with scale_exhaustion_named(), _heard(engine, listeners):
        if isinstance(engine, PipelineEngine):
            return engine.train_batch(batches)
        engine.train()
        numbers = range(1, engine.gradient_accumulation_steps() + 1)
        losses = [_train_micro_batch(engine, batches, listeners, number) for number in numbers]
        return _mean_over_ranks(losses, engine)


@contextmanager
def scale_exhaustion_named() -> Iterator[None]:
    """Give DeepSpeed's word for a loss scale that can fall no further, which all ranks raise alike, its exit code."""
    try:
        yield
    except Exception as error:
        if "loss scale already at minimum" not in str(error):
            raise
        raise NumericsError(
            "gradients overflow even at the smallest loss scale, --min-scale: lower --lr, or use --bf16"
        ) from error


@torch.no_grad()
def eval_batch(engine: DeepSpeedEngine, batches: Iterator[Batch], listeners: Sequence[Listener] = ()) -> Tensor:
    """The loss of a global batch, the same on every rank, without a step."""
    if isinstance(engine, PipelineEngine):
        with _heard(engine, listeners):
            return engine.eval_batch(batches)
    engine.eval()
    losses = [_forward(engine, next(batches)) for _ in range(engine.gradient_accumulation_steps())]
    return _mean_over_ranks(losses, engine)


@contextmanager
def _heard(engine: DeepSpeedEngine, listeners: Sequence[Listener]) -> Iterator[None]:
    """Let ``listeners`` hear what DeepSpeed does by itself: the pipeline's instructions, or the plain reduction."""
    if not listeners:
        yield
        return
    if isinstance(engine, PipelineEngine):
        name, own = "_INSTRUCTION_MAP", engine._INSTRUCTION_MAP
        told = {kind: _told(kind, execute, listeners) for kind, execute in own.items()}
    else:
        name, own = "allreduce_gradients", engine.allreduce_gradients
        told = _told(ReduceGrads, lambda _, **arguments: own(**arguments), listeners).__get__(engine)
    setattr(engine, name, told)  # in front of that of its class
    try:
        yield
    finally:
        delattr(engine, name)


def _told(kind: type[PipeInstruction], execute: Callable, listeners: Sequence[Listener]) -> Callable:
    counts: Counter[int | None] = Counter()

    def tell_and_execute(engine: DeepSpeedEngine, **arguments: Any) -> None:
        phase = arguments.get("phase")
        counts[phase] += 1
        number = counts[phase] if issubclass(kind, BufferOpInstruction) else None
        with _hearing(listeners, Instruction(kind.__name__, number, phase)):
            execute(engine, **arguments)

    return tell_and_execute


@contextmanager
def _hearing(listeners: Sequence[Listener], instruction: Instruction) -> Iterator[None]:
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener(instruction))
        yield


def step_status(engine: DeepSpeedEngine) -> StepStatus:
    """What ``engine`` says behind a step."""
    applied, norm = engine.was_step_applied(), engine.get_global_grad_norm()
    return StepStatus(
        applied=applied,
        grad_norm=float(norm) if applied and norm is not None else None,
        loss_scale=float(getattr(engine.optimizer, "loss_scale", 1.0)),
        skipped_iterations=engine.skipped_steps,
    )


def _train_micro_batch(
    engine: DeepSpeedEngine, batches: Iterator[Batch], listeners: Sequence[Listener], number: int
) -> Tensor:
    with _hearing(listeners, Instruction("LoadMicroBatch", number)):
        batch = next(batches)
    with _hearing(listeners, Instruction("ForwardPass", number)):
        loss = _forward(engine, batch)
    with _hearing(listeners, Instruction("BackwardPass", number)):
        engine.backward(loss)
    with _hearing(listeners, Instruction("OptimizerStep", number)):
        engine.step()
    return loss.detach()


def _forward(engine: DeepSpeedEngine, batch: Batch) -> Tensor:
    targets = tuple(target.to(engine.device) for target in batch.targets)
    return engine(batch.tokens.to(engine.device), targets)


def _mean_over_ranks(losses: list[Tensor], engine: DeepSpeedEngine) -> Tensor:
    group = engine.mpu.get_sequence_data_parallel_group()
    loss = torch.stack(losses).mean()
    dist.all_reduce(loss, group=group)
    return loss / group.size()


def _apex_adam(run: RunConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """apex's fused Adam where it is asked for and its state stays on the device; else None for DeepSpeed's."""
    if not uses_apex(run.model.fused_kernels) or run.zero.offloads_optimizer or "optimizer" not in run.ds_config:
        return None
    from apex.optimizers import FusedAdam

    params = {
        k: v for k, v in run.ds_config["optimizer"]["params"].items() if k in ("lr", "betas", "eps", "weight_decay")
    }
    return FusedAdam(groups, **params)


def _reduce_nothing(grads: Any = None, elements_per_buffer: int = 0) -> None:
    """In place of DeepSpeed's own reduction, where there is a single rank: it would copy all gradients to and fro."""


def _step_by_true_norm(engine: DeepSpeedEngine, layout: ParallelLayout) -> None:
    """Let this engine clip by the norm of the whole model's gradient, remember it, and skip what is not finite.

    In fp32 at ZeRO 0 DeepSpeed's own clipping counts a tied weight once for each stage that holds
    it, leaves the norms and row-parallel biases of all stages but the first out, and forgets the
    result, so that the update depends on the layout. And there alone it steps with any gradient.
    """
    optimizer, step = engine.optimizer, engine.optimizer.step

    def clip_and_step(closure: None = None) -> None:
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        norm = gradient_norm(parameters, layout)
        engine._global_grad_norm = norm.item()
        optimizer.overflow = not math.isfinite(engine._global_grad_norm)  # DeepSpeed's word for a step not made
        if not optimizer.overflow:
            torch.nn.utils.clip_grads_with_norm_(parameters, engine.gradient_clipping() or math.inf, norm)
            step()

    engine.clip_fp32_gradients = lambda: None
    clip_and_step._wrapped_by_lr_sched = True  # torch's schedule warns where its own wrapper of step is gone
    optimizer.step = clip_and_step
