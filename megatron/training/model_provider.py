"""User-provided model, data sets and forward step, as for Megatron-LM's ``pretrain``. Imports torch lazily.

The functions take the frozen configuration and the layout as arguments, instead of calling ``get_args()``.
"""

import sys
import traceback
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.common.errors import ConfigError, DataError, UserError, is_out_of_memory
from megatron.config import ModelConfig, RunConfig
from megatron.launch.rank import explanation
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec, LayerSpec, register
from megatron.parallel.pipeline.schedule import InstructionHook
from megatron.training.callbacks import OWN_METRICS, Callback

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megatron.data.loader import Batch
    from megatron.engines.containers import Layers
    from megatron.model.loss import LossFn
    from megatron.parallel.layout import ParallelLayout


@contextmanager
def user_function(name: str) -> Iterator[None]:
    """Turn an exception of a user's function into a ConfigError with file and line.

    Errors that are not its own, such as lost connections, crashed workers and full disks, are raised unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if explanation(error) is not None or is_out_of_memory(error):
            raise
        package, frames = str(Path(__file__).parents[1]), traceback.extract_tb(error.__traceback__)
        outside = [frame for frame in frames if not frame.filename.startswith((package, sys.prefix, "<"))]
        at = (outside or frames)[-1]
        raise ConfigError(f"{name}: {type(error).__name__}: {error} ({at.filename}:{at.lineno})") from error


def checked_loss(loss: Any, function: str) -> "Tensor":
    """The loss [] that a user's ``function`` has returned. Raises ConfigError unless it is a tensor of one number."""
    from torch import Tensor

    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ConfigError(
            f"the loss of {function} is {found}: return a tensor of one number, the mean of the micro-batch"
        )
    return loss.reshape(())


@dataclass(frozen=True)
class ModelProvider:
    """The functions that a user passes to ``pretrain``, which documents their arguments and results."""

    model: Callable[[RunConfig, Any], Any]
    datasets: Callable[[RunConfig, Sequence[int]], Sequence[Any]]
    forward_step: Callable[[Any, Any], Any]
    add_flags: Callable[[ArgumentParser], Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of flags by name."""
    layers_are_stages: ClassVar[bool] = False
    """Whether each element of ``layers`` is a full pipeline stage."""

    def extend(self, parser: ArgumentParser) -> None:
        """Let the user add flags. Raises ConfigError if one exists already."""
        if self.add_flags is None:
            return
        parser.argument_default = None  # such flags have argparse's own default
        with user_function("extra_args_provider"):
            try:
                self.add_flags(parser)
            except ArgumentError as error:
                raise ConfigError(f"extra_args_provider adds a flag that exists already: {error}") from None

    def module(self, run: RunConfig, layout: "ParallelLayout") -> "nn.Module":
        """The full model for ``DeepSpeedEngine``. Raises ConfigError for settings that need a list of layers."""
        from torch.nn import Module

        from megatron.engines.containers import ProvidedModel, SequentialModel

        with user_function("model_provider"):
            model = self.model(run, layout)
        if isinstance(model, list | tuple):
            return SequentialModel(model, self.loss_of_outputs, run.activation)
        if not isinstance(model, Module) or not any(weight.requires_grad for weight in model.parameters()):
            raise ConfigError(
                f"model_provider returned a {type(model).__name__} without weights to train: let it return a module, "
                "or a list of layers"
            )
        if run.activation.layers_together:
            raise ConfigError(
                "--checkpoint-activations recomputes transformer layers in a list: let model_provider return a list of "
                "layers, or call deepspeed.checkpointing.checkpoint() in the model"
            )
        return ProvidedModel(model, self.loss)

    def layers(self, run: RunConfig, layout: "ParallelLayout") -> tuple["Layers", "LossFn"]:
        """The layers for the pipeline engine, and the loss. Raises ConfigError if the model is not a list of layers."""
        with user_function("model_provider"):
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
        """The loss of a micro-batch: the result of ``forward_step``, or its first element."""
        with user_function("forward_step"):
            result = self.forward_step(iter([(inputs, *targets)]), model)
        return checked_loss(result[0] if isinstance(result, tuple) else result, "forward_step")

    def loss_of_outputs(self, outputs: Any, targets: Sequence[Any]) -> "Tensor":
        """The loss of layers that have already run: ``forward_step`` gets a model that returns their ``outputs``."""
        return self.loss(lambda *_: outputs, None, targets)  # type: ignore[arg-type]  # called like a module

    def open(self, run: RunConfig, samples: Sequence[int]) -> list["ProvidedDataset | None"]:
        """Data sets for training, validation and test with the given numbers of samples; None for a split without data.

        Raises DataError if there are not three data sets, if there is none for training, or if one that is used is
        empty.
        """
        with user_function("train_valid_test_datasets_provider"):
            datasets = self.datasets(run, samples)
            if len(datasets) != 3 or datasets[0] is None:
                raise DataError(
                    "train_valid_test_datasets_provider must return three data sets, of which validation and test may "
                    "be None"
                )
            used = [dataset if count else None for dataset, count in zip(datasets, samples, strict=True)]
            if any(dataset is not None and not len(dataset) for dataset in used):
                raise DataError("train_valid_test_datasets_provider returned a data set without samples")
        return [
            None if dataset is None else ProvidedDataset(dataset, count)
            for dataset, count in zip(used, samples, strict=True)
        ]

    def batch(self, parts: Sequence["Tensor"]) -> "Batch":
        """A micro-batch from the parts of a collated sample: the first is the model's input, the others targets."""
        from megatron.data.loader import Batch

        inputs, *targets = parts
        return Batch(inputs, tuple(targets))


class UserCallback(Callback):
    """A user's callback, in which an error is that of a ``user_function`` and names class, method and iteration."""

    def __init__(self, callback: Callback) -> None:
        self._callback, self._iteration = callback, 0

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """The context of the user; its hooks are guarded, too."""
        self._iteration = iteration
        with self._guarded(lambda: self._callback.around_iteration(iteration)) as hooks:
            with user_function(self._name("around_iteration")):
                guarded = [partial(self._guarded, hook) for hook in hooks]
            yield guarded

    def metrics(self) -> Mapping[str, Any]:
        """Those of the user. Raises ConfigError unless each is a number or a tensor of one, of a name of its own."""
        from torch import Tensor

        with user_function(self._name("metrics")):
            values = dict(self._callback.metrics())
        for name, value in values.items():
            if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)):
                kind = f"a tensor of {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise ConfigError(f"{self._name('metrics')} returned {kind} for {name}: return a number")
            if not isinstance(name, str) or name in OWN_METRICS:
                raise ConfigError(f"{self._name('metrics')} returned {name!r}: give it a name that no other metric has")
        return values

    def _name(self, method: str) -> str:
        return f"in iteration {self._iteration}, {type(self._callback).__name__}.{method}"

    def _called(self, method: str, *arguments: Any) -> Any:
        with user_function(self._name(method)):
            return getattr(self._callback, method)(*arguments)

    on_run_start = partialmethod(_called, "on_run_start")
    on_metrics = partialmethod(_called, "on_metrics")
    on_out_of_memory = partialmethod(_called, "on_out_of_memory")
    on_run_end = partialmethod(_called, "on_run_end")

    @contextmanager
    def _guarded(self, make: Callable[..., AbstractContextManager], *arguments: Any) -> Iterator[Any]:
        """The context that ``make`` returns; an error of what runs inside of it stays as it is."""
        name = self._name("around_iteration")
        with ExitStack() as stack:
            with user_function(name):
                value = stack.enter_context(make(*arguments))
            yield value
            with user_function(name):
                stack.close()


class ProvidedDataset:
    """The first ``samples`` samples of a user's data set, which is repeated if it has fewer."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset, self._samples = dataset, samples

    def __len__(self) -> int:
        """The number of samples that was requested."""
        return self._samples

    def first(self) -> Any:
        """The first sample."""
        return self._dataset[0]

    def take(self, indices: Sequence[int]) -> Any:
        """The samples at ``indices``, collated: a list with one tensor [n, ...] for each part of a sample."""
        from torch.utils.data import default_collate

        with user_function("the data set"):
            samples = [self._dataset[index % len(self._dataset)] for index in indices]
            if isinstance(samples[0], Mapping):
                samples = [tuple(sample.values()) for sample in samples]
            return default_collate([sample if isinstance(sample, tuple | list) else (sample,) for sample in samples])


def provided_architecture(provider: ModelProvider) -> ArchitectureSpec:
    """Register the model of this program as an architecture; checkpoints record the program's name."""
    program = Path(sys.argv[0]).name
    return register(ArchitectureSpec(program, program, GPT2.tokenizers, _layers, loss="", provider=provider))


def _layers(config: ModelConfig) -> list[LayerSpec]:
    """Specs of layers that the pipeline partitions evenly; only their number is known. The name is the one that the
    default method of ``--pipeline-partition`` counts.
    """
    return [LayerSpec(name="ParallelTransformerLayer", is_block=True)] * config.num_layers
