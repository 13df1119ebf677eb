"""The weights that a rank holds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.config import RunConfig
from megatron.model.partition import Stage, counts, plan
from megatron.model.spec import LayerSpec, is_trained


class Weight(NamedTuple):
    """One parameter as a tensor-parallel rank holds it."""

    name: str
    numel: int
    decays: bool
    """Whether the optimizer's weight decay takes it: matrices, not biases and norms."""
    shape: tuple[int, ...] = ()
    """Of the whole parameter."""
    is_block_matrix: bool = False
    """Whether it is a matrix of a transformer layer, which Muon updates."""
    is_trained: bool = True
    """Whether it has a gradient and optimizer state."""
    is_divided: bool = False
    """Whether it is of experts that other data-parallel ranks do not hold."""


@dataclass(frozen=True)
class Weights:
    """The weights that a rank holds."""

    layers: Sequence[Sequence[Weight]]
    """Of each layer in order. Those of equal layers are one object."""

    @cached_property
    def counts(self) -> list[tuple[Weight, int]]:
        """Distinct weights, each with how often it is there."""
        return [(weight, count) for layer, count in self._kinds for weight in layer]

    @cached_property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(count * weight.numel for weight, count in self.counts)

    @cached_property
    def trained(self) -> "Weights":
        """Those that training changes."""
        return self if all(weight.is_trained for weight, _ in self.counts) else self._only(is_trained=True)

    @cached_property
    def groups(self) -> list["Weights"]:
        """Those with weight decay, those without, and with expert parallelism the experts."""
        shared = [self._only(is_divided=False, decays=decays) for decays in (True, False)]
        experts = self._only(is_divided=True)
        return [*shared, experts] if experts.numel else shared

    @cached_property
    def _kinds(self) -> tuple[tuple[Sequence[Weight], int], ...]:
        return counts(self.layers)

    def _only(self, **facts: bool) -> "Weights":
        """Those of which ``facts`` are true."""
        kinds = {
            id(layer): [one for one in layer if all(getattr(one, name) is fact for name, fact in facts.items())]
            for layer, _ in self._kinds
        }
        return Weights([kinds[id(layer)] for layer in self.layers])


def stage_weights(run: RunConfig, stage: Stage) -> Weights:
    """What a tensor-parallel rank of ``stage`` holds; parameters of tied layers once."""
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


def rank_parameters(run: RunConfig) -> list[int]:
    """Elements that one rank of each stage holds."""
    return [stage_weights(run, stage).numel for stage in plan(run)]
