"""Build the engine of a run: the model, its optimizer and its learning-rate schedule in one of DeepSpeed's engines."""

import importlib
import sys
from collections.abc import Callable
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

check_overrides()  # all modules that override something are imported above

Scheduler = Callable[[Optimizer], LRScheduler]
"""Makes the learning-rate schedule of an optimizer."""


def build_engine(run: RunConfig, layout: ParallelLayout, lr_scheduler: Scheduler) -> Engine:
    """The engine that ``run.parallel`` requires. ``train_batch`` and ``eval_batch`` of all of them work alike."""
    if not run.model.compile:
        import_compiler_late()
    else:
        learn_functions_of_torch()
    if run.activation.checkpoint_activations:
        deepspeed.checkpointing.configure(layout, deepspeed_config=dict(run.ds_config))
    module = build_module(run, layout)
    freeze(module, run.model)
    if run.model.compile and run.zero.zero_stage == 3:
        # Weights are gathered by hooks of modules, for which the compiler would end a graph: not within a layer.
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
            mpu=None if run.parallel.uses_pipeline else layout,  # the pipeline engine makes its own
        )
    assert isinstance(engine, Engine), "DeepSpeed chooses the engine elsewhere"
    return engine


def learn_functions_of_torch() -> None:
    """Let torch's compiler learn which functions it can trace, before ZeRO 3 replaces some of them.

    DeepSpeed 0.19.8: runtime/zero/partition_parameters.py replaces torch.arange and others while a model is built. In a
    list that is made meanwhile the real ones are missing, and every use of RoPE ends a graph.
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
    """While inside, ``deepspeed.initialize`` makes our engines. It chooses between two by the class of the module."""
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
    """The DeepSpeed config, without its optimizer if there is one, as the engine counts samples.

    ZeRO's bucket for the reduction of gradients is no larger than the model: DeepSpeed allocates all of it, and on the
    CPU maps that much memory again in every step.
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
    """Let a run that compiles no layers, and has not imported torch's compiler, start without it.

    Not for a run with ``--compile``: what is excluded from compilation before the compiler is imported stays included.

    torch: optimizers and DeepSpeed's ZeRO 3 import torch._dynamo to exclude functions from compilation.
    DeepSpeed: runtime/zero/muon/original_muon.py, which every ZeRO optimizer imports and no run of ours uses, compiles
    functions where it defines them. A rank starts in 1.7 s instead of 2.9 s (ZeRO 0) or 3.7 s (ZeRO 1), and
    takes 70 to 110 MB less memory.
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
    """torch._dynamo for those who only exclude functions from compilation. Any other use imports the real module."""

    @staticmethod
    def disable(fn: Callable | None = None, *_: Any, **__: Any) -> Callable:
        """``fn`` itself, or a decorator that returns what it is given."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Nothing is traced here."""

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real module; of the module's own ones only the path, by which submodules are found."""
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it in the real module, as the import of a submodule does."""
        setattr(self._real(), name, value)

    def _real(self) -> ModuleType:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME], vars(torch)["_dynamo"]
        return importlib.import_module(_NAME)
