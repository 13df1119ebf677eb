"""A model, its data and its loss given as functions, in the shape of Megatron-LM's ``pretrain``. Torch only in use.

The functions take the frozen configuration and the layout as arguments, where Megatron-LM has ``get_args()``.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.common.errors import ConfigError, DataError
from megatron.config import ModelConfig, RunConfig
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec, LayerSpec, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.data.loader import Batch
    from megatron.engines.containers import Layers
    from megatron.model.loss import LossFn
    from megatron.parallel.layout import ParallelLayout


@dataclass(frozen=True)
class ModelProvider:
    """The functions that a user of ``pretrain`` has written; see there what each of them takes and returns."""

    model: Callable[[RunConfig, Any], Any]
    datasets: Callable[[RunConfig, Sequence[int]], Sequence[Any]]
    forward_step: Callable[[Any, Any], Any]
    add_flags: Callable[[ArgumentParser], Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of flags that the command line may change."""

    def module(self, run: RunConfig, layout: "ParallelLayout") -> "nn.Module":
        """The full model for ``DeepSpeedEngine``. Raises ConfigError for settings that need layers."""
        from megatron.engines.containers import ProvidedModel, SequentialModel

        model = self.model(run, layout)
        if isinstance(model, list | tuple):
            return SequentialModel(model, self.loss_of_outputs, run.activation)
        if run.activation.layers_together:
            raise ConfigError(
                "--checkpoint-activations recomputes transformer layers in a list: let model_provider return a list of "
                "layers, or call deepspeed.checkpointing.checkpoint() in the model"
            )
        return ProvidedModel(model, self.loss)

    def layers(self, run: RunConfig, layout: "ParallelLayout") -> tuple["Layers", "LossFn"]:
        """The layers for the pipeline engine, and the loss. Raises ConfigError if the model is no list of them."""
        layers = self.model(run, layout)
        if not isinstance(layers, list | tuple):
            raise ConfigError(
                f"--pipe-parallel-size {run.parallel.pipe_parallel_size} needs a list of layers, and model_provider "
                f"returned a {type(layers).__name__}: return a list, or remove the flag"
            )
        if len(layers) != run.model.num_layers:
            raise ConfigError(
                f"--num-layers {run.model.num_layers} is the number of layers that the pipeline divides, and "
                f"model_provider returned {len(layers)}: give that number"
            )
        return layers, self.loss_of_outputs

    def loss(self, model: "nn.Module", inputs: Any, targets: Sequence[Any]) -> "Tensor":
        """The loss of a micro-batch: what ``forward_step`` returns, or the first part of it."""
        result = self.forward_step(iter([(inputs, *targets)]), model)
        return result[0] if isinstance(result, tuple) else result

    def loss_of_outputs(self, outputs: Any, targets: Sequence[Any]) -> "Tensor":
        """The same where the layers have run already: ``forward_step`` gets a model that returns their outputs."""
        return self.loss(lambda *_: outputs, None, targets)  # type: ignore[arg-type]  # called as a module is

    def open(self, run: RunConfig, samples: Sequence[int]) -> list["ProvidedDataset | None"]:
        """Data sets of so many samples for training, validation and test; None for a split without data.

        Raises DataError if there are no three of them, none for training, or one without a sample.
        """
        datasets = self.datasets(run, samples)
        if len(datasets) != 3 or datasets[0] is None:
            raise DataError(
                "train_valid_test_datasets_provider must return three data sets, of which validation and test may be "
                "None"
            )
        if any(dataset is not None and not len(dataset) for dataset in datasets):
            raise DataError("train_valid_test_datasets_provider returned a data set without samples")
        return [
            None if dataset is None or not count else ProvidedDataset(dataset, count)
            for dataset, count in zip(datasets, samples, strict=True)
        ]


class ProvidedDataset:
    """``samples`` samples of a user's data set, in its order; from its beginning again if it has fewer."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset, self._samples = dataset, samples

    def __len__(self) -> int:
        """Samples, as many as were requested."""
        return self._samples

    def take(self, indices: Sequence[int]) -> Any:
        """Some samples, collated: a list of one tensor [n, ...] for each part of a sample."""
        from torch.utils.data import default_collate

        samples = [self._dataset[index % len(self._dataset)] for index in indices]
        return default_collate([sample if isinstance(sample, tuple | list) else (sample,) for sample in samples])


def provided_batch(parts: Sequence["Tensor"]) -> "Batch":
    """The parts of a collated sample as a micro-batch: the first is the input of the model, the others are targets."""
    from megatron.data.loader import Batch

    inputs, *targets = parts
    return Batch(inputs, tuple(targets))


def provided_architecture(provider: ModelProvider) -> ArchitectureSpec:
    """The architecture of this program, by whose name its checkpoints are known."""
    program = Path(sys.argv[0]).name
    return register(ArchitectureSpec(program, program, GPT2.tokenizers, _layers, loss="", provider=provider))


def _layers(config: ModelConfig) -> list[LayerSpec]:
    """Layers that the pipeline divides evenly; nothing else is known of them. By their name the default method of
    ``--pipeline-partition`` counts them.
    """
    return [LayerSpec(name="ParallelTransformerLayer", is_block=True)] * config.num_layers
