"""Builds the engine of a run: a subclass of a DeepSpeed engine with model, optimizer and learning-rate schedule."""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megatron.common.errors import ConfigError, first_line
from megatron.config import ModelConfig, RunConfig
from megatron.config.memory import DEFAULT_REDUCE_BUCKET
from megatron.engines.containers import Layers, SequentialModel, build_layers
from megatron.engines.engine import Engine, SequentialEngine
from megatron.engines.optimizers import client_optimizer, parameter_groups
from megatron.engines.overrides import check_overrides, replaced
from megatron.engines.pipeline import PipelinedModel
from megatron.engines.schedules import PipelinedEngine
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


def check_safe_modules(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if ``torch_autocast`` of a DeepSpeed config names what is no class of modules."""
    section = config.get("torch_autocast", {})
    for name in section.get("lower_precision_safe_modules", ()) if section.get("enabled") else ():
        package, _, class_ = name.rpartition(".")
        try:
            found, reason = getattr(importlib.import_module(package), class_), ""
        except Exception as error:  # the package may raise any
            found, reason = None, f" ({first_line(error)})"
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ConfigError(
                f"torch_autocast.lower_precision_safe_modules: {name} is no class of modules{reason}: write one such "
                "as torch.nn.Linear, or remove it"
            )


def learn_functions_of_torch() -> None:
    """Make torch.compile build its table of traceable functions before ZeRO 3 replaces some of them.

    DeepSpeed 0.19.8: runtime/zero/partition_parameters.py replaces torch.arange and others while a model is built. A
    table built during that time lacks the real functions, and every use of RoPE breaks the graph.
    Test: tests/training/test_compile.py.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


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


_NAME = "torch._dynamo"


def import_compiler_late() -> None:
    """Delay the import of torch._dynamo until it is used, in a run without ``--compile``.

    Not for a run with ``--compile``: functions excluded from compilation before the import would not stay excluded.

    torch: optimizers and DeepSpeed's ZeRO 3 import torch._dynamo to exclude functions from compilation.
    DeepSpeed: runtime/zero/muon/original_muon.py, which every ZeRO optimizer imports but no run uses here, decorates
    functions with torch.compile. A rank starts in 1.7 s instead of 2.9 s (ZeRO 0) or 3.7 s (ZeRO 1), and takes 70 to
    110 MB less memory.
    Tests: tests/engines/test_late_compiler.py, tests/launch/test_launchers.py. Remove when a run without ``--compile``
    does not import torch._dynamo.
    """
    if _NAME in sys.modules:
        return
    with patch("torch.compile", lambda function: function):
        from deepspeed.runtime.zero.muon import original_muon  # noqa: F401
    placeholder = _Placeholder(_NAME)
    sys.modules[_NAME] = placeholder
    vars(torch)["_dynamo"] = placeholder


class _Placeholder(ModuleType):
    """Stands in for torch._dynamo while only ``disable`` and ``graph_break`` are used; then imports the real one."""

    @staticmethod
    def disable(fn: Callable | None = None, *_: Any, **__: Any) -> Callable:
        """Return ``fn`` unchanged, or a decorator that does so."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing: nothing is traced."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real module. Dunder names are not forwarded, except ``__path__`` for submodules."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute of the real module, as the import of a submodule does."""
        setattr(self._real(), name, value)

    def _real(self) -> ModuleType:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], vars(torch)["_dynamo"]
        return importlib.import_module(_NAME)
