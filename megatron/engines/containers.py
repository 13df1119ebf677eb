"""Builds DeepSpeed layers from layer specs, and the model container for the engine without a pipeline.

b batch, s sequence, v padded vocabulary, t tensor-parallel size
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pkgutil import resolve_name
from typing import Any

import deepspeed
from deepspeed.pipe import LayerSpec as UnbuiltLayer
from deepspeed.pipe import TiedLayerSpec as UnbuiltTiedLayer
from torch import Tensor, nn

from megatron.config import ActivationConfig, ModelConfig
from megatron.model.architectures import architecture_of
from megatron.model.loss import LossFn
from megatron.model.spec import LayerSpec
from megatron.model.t5 import RelativePositions, with_bias_apart, without_bias
from megatron.model.transformer import HiddenStates, ParallelTransformerLayer
from megatron.parallel.layout import ParallelLayout

Layer = Callable[[HiddenStates], HiddenStates]
Layers = Sequence[UnbuiltLayer | Layer]
"""Unbuilt layers of a model in order. The index of a layer is its number in parameter names and checkpoint files."""


def build_layers(specs: Sequence[LayerSpec], config: ModelConfig, layout: ParallelLayout) -> Layers:
    """Unbuilt layers for ``specs``; a container builds the layers of its pipeline stage.

    Transformer layers are numbered from 1. The first use of a tied layer builds the module and has a file in
    checkpoints; further uses call functions of that module.
    """
    layers: list[UnbuiltLayer | Layer] = []
    number, tied = 0, set[str]()
    for spec in specs:
        if not spec.module:
            layers.append(resolve_name(spec.forward))
            continue
        number += spec.is_block
        arguments = {**spec.arguments, "layer_number": number} if spec.is_block else spec.arguments
        build = partial(resolve_name(spec.module), config, layout, **arguments)
        if spec.tied is None:
            layers.append(_SpecifiedLayer(nn.Module, build))
            continue
        forward = resolve_name(spec.forward) if spec.forward else nn.Module.__call__ if spec.tied in tied else None
        shared = [parameter.name for parameter in spec.parameters]
        layers.append(_SpecifiedTiedLayer(spec.tied, nn.Module, build, forward_fn=forward, tied_weight_attr=shared))
        tied.add(spec.tied)
    return layers


class _SpecifiedLayer(UnbuiltLayer):
    """A layer spec with a build function. DeepSpeed's takes only classes, but the class of a norm is chosen late."""

    def build(self, log: bool = False) -> nn.Module:
        (build,) = self.module_args
        return build()


class _SpecifiedTiedLayer(_SpecifiedLayer, UnbuiltTiedLayer):
    """A tied layer spec with a build function."""


def loss_parts(container: nn.Module) -> dict[str, Tensor]:
    """The terms of the container's last loss by name; empty if its loss function has no ``parts``."""
    return getattr(getattr(container, "loss_fn", None), "parts", {})


class SequentialModel(nn.Module):
    """A model without pipeline stages, for any ZeRO stage. Parameters have the same names as in a pipeline."""

    def __init__(self, layers: Layers, loss_fn: LossFn, activation: ActivationConfig):
        super().__init__()
        self.layers_per_checkpoint = activation.layers_together
        self.loss_fn = loss_fn
        self.tied_modules = nn.ModuleDict()
        self.forward_funcs = [self._build(index, spec) for index, spec in enumerate(layers)]

    def _build(self, index: int, spec: UnbuiltLayer | Layer) -> Layer:
        if isinstance(spec, nn.Module):
            self.add_module(str(index), spec)
        if not isinstance(spec, UnbuiltLayer):
            return spec
        if not isinstance(spec, UnbuiltTiedLayer):
            self.add_module(str(index), spec.build())
            return self.get_submodule(str(index))
        if spec.key not in self.tied_modules:
            self.tied_modules[spec.key] = spec.build()
        tied = self.tied_modules[spec.key]
        return partial(spec.forward_fn, tied) if spec.forward_fn else tied

    def forward(self, inputs: Tensor, targets: tuple[Tensor, ...] | None = None) -> Any:
        """The loss; without targets the output of the last layer, such as logits [b, s, v/t]."""
        outputs = run_layers(self.forward_funcs, inputs, self.layers_per_checkpoint if self.training else 0)
        return outputs if targets is None else self.loss_fn(outputs, targets)


def sequential_model(config: ModelConfig, activation: ActivationConfig, layout: ParallelLayout) -> SequentialModel:
    """Build the model of ``config`` without pipeline stages."""
    architecture = architecture_of(config)
    layers = build_layers(architecture.layers(config), config, layout)
    return SequentialModel(layers, architecture.build_loss(config, layout), activation)


class ProvidedModel(nn.Module):
    """A user's model that is not a list of layers, with its loss; for any ZeRO stage.

    ``loss(model, inputs, targets)`` must call the model.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Tensor, tuple[Tensor, ...]], Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        """The loss of a micro-batch."""
        return self.loss(self.model, inputs, targets)


def run_layers(layers: Sequence[Layer], hidden_states: Any, layers_per_checkpoint: int = 0) -> Any:
    """Run the layers in order, with activation checkpointing of ``layers_per_checkpoint`` transformer layers each."""
    for is_recomputed, neighbors in groupby(layers, _is_recomputed):
        if is_recomputed and layers_per_checkpoint:
            hidden_states = _run_recomputed(list(neighbors), hidden_states, layers_per_checkpoint)
        else:
            hidden_states = run_in_order(list(neighbors), hidden_states)
    return hidden_states


def _is_recomputed(layer: Layer) -> bool:
    module = layer.args[0] if isinstance(layer, partial) else layer  # a partial is a further use of a tied layer
    return isinstance(module, ParallelTransformerLayer | RelativePositions)


def _run_recomputed(layers: Sequence[Any], hidden_states: Any, layers_per_checkpoint: int) -> Any:
    """Run transformer layers with activation checkpointing; relative positions in front of them are not recomputed."""
    remaining, bias = [layer for layer in layers if isinstance(layer, ParallelTransformerLayer)], None
    if len(remaining) < len(layers):
        hidden_states, bias = with_bias_apart(layers[0], hidden_states)
    while remaining:
        together, remaining = remaining[:layers_per_checkpoint], remaining[layers_per_checkpoint:]
        tensors = hidden_states if isinstance(hidden_states, tuple) else (hidden_states,)
        hidden_states = deepspeed.checkpointing.checkpoint(partial(_run_together, together, bias), *tensors)
    return hidden_states


def run_in_order(layers: Sequence[Layer], hidden_states: Any) -> Any:
    """Run the layers in order, without activation checkpointing."""
    for layer in layers:
        hidden_states = layer(hidden_states)
    return hidden_states


def _run_together(layers: Sequence[Layer], bias: Tensor | None, *tensors: Tensor) -> Any:
    if bias is not None:
        return without_bias(run_in_order(layers, (*tensors, bias)))
    return run_in_order(layers, tensors if len(tensors) > 1 else tensors[0])
