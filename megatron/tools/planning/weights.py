"""The weights of a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.model.partition import Stage, counts
from megatron.model.spec import LayerSpec, is_trained


class Weight(NamedTuple):
    """One parameter on a tensor-parallel rank."""

    name: str
    numel: int
    decays: bool
    """Whether the optimizer's weight decay applies to it: to matrices, not to biases and norms."""
    shape: tuple[int, ...] = ()
    """Of the full parameter."""
    is_block_matrix: bool = False
    """Whether it is a matrix of a transformer layer, which Muon updates."""
    is_trained: bool = True
    """Whether it has a gradient and optimizer state."""
    is_divided: bool = False
    """Whether it belongs to experts that expert parallelism divides."""


@dataclass(frozen=True)
class Weights:
    """The weights of a rank."""

    layers: Sequence[Sequence[Weight]]
    """The weights of each layer in order. Equal layers are one object."""

    @cached_property
    def counts(self) -> list[tuple[Weight, int]]:
        """Distinct weights, each with the number of times it occurs."""
        return [(weight, count) for layer, count in counts(self.layers) for weight in layer]

    @cached_property
    def numel(self) -> int:
        """Elements of all weights."""
        return sum(count * weight.numel for weight, count in self.counts)

    @cached_property
    def trained(self) -> "Weights":
        """The weights that training changes."""
        return self if all(weight.is_trained for weight, _ in self.counts) else self._select(lambda one: one.is_trained)

    @cached_property
    def groups(self) -> list["Weights"]:
        """The weights with decay, the weights without, and with expert parallelism the experts."""
        experts = self._select(lambda one: one.is_divided)
        return [
            self._select(lambda one: one.decays and not one.is_divided),
            self._select(lambda one: not (one.decays or one.is_divided)),
            *([experts] if experts.numel else []),
        ]

    def _select(self, condition: Callable[[Weight], bool]) -> "Weights":
        kinds = {id(layer): list(filter(condition, layer)) for layer, _ in counts(self.layers)}
        return Weights([kinds[id(layer)] for layer in self.layers])


def stage_weights(run: RunConfig, stage: Stage) -> Weights:
    """The weights of a tensor-parallel rank of ``stage``; tied layers count once."""
    of_layers = {id(layer): _layer_weights(run, layer) for layer, _ in stage.counts}
    return Weights([of_layers[id(layer)] for layer in stage.distinct_layers()])


def _layer_weights(run: RunConfig, layer: LayerSpec) -> list[Weight]:
    t, experts = run.parallel.model_parallel_size, run.parallel.expert_model_parallel_size
    return [
        Weight(
            spec.name,
            spec.local_numel(t, experts),
            decays=spec.weight_decay and is_trained(run.model, spec.name),
            shape=spec.shape,
            is_block_matrix=layer.is_block and len(spec.shape) > 1,
            is_trained=is_trained(run.model, spec.name),
            is_divided=spec.is_expert and experts > 1,
        )
        for spec in layer.parameters
    ]
