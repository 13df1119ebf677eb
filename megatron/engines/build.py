"""Builds the engine of a run: a subclass of a DeepSpeed engine with model, optimizer and learning-rate schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron.config import ModelConfig, RunConfig
from megatron.config.memory import DEFAULT_REDUCE_BUCKET
from megatron.engines.compiler import import_compiler_late, learn_functions_of_torch
from megatron.engines.containers import Layers, SequentialModel, build_layers
from megatron.engines.engine import Engine
from megatron.engines.optimizers import client_optimizer, parameter_groups
from megatron.engines.overrides import check_overrides, replaced
from megatron.engines.pipelined_engine import PipelinedEngine
from megatron.engines.pipelined_model import PipelinedModel
from megatron.engines.sequential_engine import SequentialEngine
from megatron.model.architectures import architecture_of
from megatron.model.loss import LossFn
from megatron.model.partition import layers_per_chunk, partition_boundaries
from megatron.model.spec import is_trained
from megatron.model.transformer import ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout
from megatron.parallel.pipeline.schedule import schedule_of

check_overrides()  # all modules with overrides are imported above

Scheduler = Callable[[Optimizer], LRScheduler]
"""Creates the learning-rate schedule for an optimizer."""


def build_engine(run: RunConfig, layout: ParallelLayout, lr_scheduler: Scheduler) -> Engine:
    """Build the sequential or pipelined engine of ``run``; both have the same ``train_batch`` and ``eval_batch``."""
    if not run.model.compile:
        import_compiler_late()
    else:
        learn_functions_of_torch()
    if run.activation.checkpoint_activations:
        deepspeed.checkpointing.configure(layout, deepspeed_config=dict(run.ds_config))
    module = build_module(run, layout)
    freeze(module, run.model)
    if run.model.compile and run.zero.zero_stage == 3:
        # ZeRO 3 gathers weights in module hooks, which break compiled graphs: gather for entire layers only.
        set_z3_leaf_modules(module, [ParallelTransformerLayer], raise_if_not_found=False)
    groups = parameter_groups(module, run)
    optimizer = client_optimizer(run, module, groups, layout)
    with our_engines(run, layout):
        engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=groups,
            optimizer=optimizer,
            config=_engine_config(run, module, has_optimizer=optimizer is not None),
            lr_scheduler=lr_scheduler,
            mpu=None if run.parallel.uses_pipeline else layout,  # the pipeline engine creates its own
        )
    assert isinstance(engine, Engine), "deepspeed.initialize has not used the replaced engine classes"
    return engine


def freeze(module: nn.Module, model: ModelConfig) -> None:
    """Freeze the parameters of ``module`` that training does not change."""
    if model.lora_rank or model.vision_num_layers:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(is_trained(model, name))


def our_engines(run: RunConfig, layout: ParallelLayout) -> Any:
    """A context in which ``deepspeed.initialize`` creates the engines of this package.

    It chooses one of the two engines by the class of the module.
    """
    return replaced(
        deepspeed,
        DeepSpeedEngine=partial(SequentialEngine, run=run, layout=layout),
        PipelineEngine=partial(PipelinedEngine, run=run, layout=layout),
    )


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
        is_divided = provider is not None and provider.layers_are_stages
        boundaries = (
            list(range(len(layers) + 1)) if is_divided else partition_boundaries(layers_per_chunk(run), run.model)
        )
        return PipelinedModel(
            layers, loss_fn, run.activation, layout, partition_boundaries=boundaries, schedule=schedule_of(run)
        )
    with deepspeed.zero.Init(
        data_parallel_group=layout.get_sequence_data_parallel_group(),
        config_dict_or_path=dict(run.ds_config),
        mpu=layout,
        enabled=run.zero.zero_stage == 3,
    ):
        if provider is not None:
            return provider.module(run, layout)
        return SequentialModel(*layers_and_loss(), run.activation)


def _engine_config(run: RunConfig, module: nn.Module, *, has_optimizer: bool) -> dict[str, Any]:
    """The DeepSpeed config with ``train_batch_size`` as the engine counts samples; without optimizer if one is passed.

    ZeRO's reduce bucket is limited to the size of the model: DeepSpeed allocates all of it, and on the CPU maps that
    much memory again in every step.
    """
    config = dict(run.ds_config)
    if has_optimizer:
        del config["optimizer"]
    if run.parallel.samples_counted > 1:
        config["train_batch_size"] = run.train.global_batch_size * run.parallel.samples_counted
    if run.zero.zero_stage > 0:
        zero = config["zero_optimization"]
        trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
        elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
        bucket = min(int(zero.get("reduce_bucket_size", DEFAULT_REDUCE_BUCKET)), elements)
        config["zero_optimization"] = {**zero, "reduce_bucket_size": bucket}
    return config
