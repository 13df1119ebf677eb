"""Runs programs written like Megatron-LM's ``pretrain_gpt.py``: ``pretrain()``, ``get_args()``, ``get_timers()`` etc.

``pretrain`` sets the global state. Besides ``megatron.mpu`` this is the only module with global state; no other module
imports it.
"""

import inspect
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from megatron import mpu
from megatron.cli.parser import names_of
from megatron.common.environment import rank
from megatron.common.errors import ConfigError
from megatron.config import RunConfig
from megatron.data.loader import Batch
from megatron.engines.containers import Layers, ProvidedModel
from megatron.engines.transfers import as_list
from megatron.launch.rank import run_rank
from megatron.model.loss import LossFn
from megatron.parallel.layout import ParallelLayout
from megatron.tools import pretraining
from megatron.training.model_provider import (
    ModelProvider,
    ProvidedDataset,
    checked_loss,
    provided_architecture,
    user_function,
)

_state = SimpleNamespace(run=None, args=None, timers=None, board=None)


class ModelType(Enum):
    """Megatron-LM's kinds of models. Only ``encoder_or_decoder`` is supported: no split between encoder and decoder."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


def get_args() -> Namespace:
    """The arguments of the run, under the name and all aliases of each flag, including flags the program has added."""
    if _state.args is None:
        raise ConfigError("get_args: there are no arguments before pretrain(): call it in a function given to pretrain")
    return _state.args


def get_timers() -> "Timers":
    """The timers of this process."""
    _state.timers = _state.timers or Timers()
    return _state.timers


def get_tensorboard_writer() -> Any:
    """The writer of --tensorboard-dir on rank 0; None without the flag and on the other ranks."""
    args = get_args()
    if args.tensorboard_dir and not args.rank and _state.board is None:
        from torch.utils.tensorboard import SummaryWriter

        _state.board = SummaryWriter(args.tensorboard_dir)
    return _state.board


def get_tokenizer() -> Any:
    """The tokenizer of the run; ``eod`` is the token between documents."""
    from megatron.tokenizer import tokenizer_of

    get_args()
    return tokenizer_of(_state.run.data)


def print_rank_0(message: object) -> None:
    """Print on the first rank."""
    if not rank(os.environ):
        print(message, flush=True)


def print_rank_last(message: object) -> None:
    """Print on the last rank."""
    if rank(os.environ) == get_args().world_size - 1:
        print(message, flush=True)


class Timers:
    """Stopwatches by name: ``timers("forward").start()``. On a GPU they time the calls, not the kernels."""

    def __init__(self) -> None:
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer":
        return self._timers.setdefault(name, _Timer())

    def log(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, **_: Any) -> None:
        """Print milliseconds on the last rank."""
        known = {name: self(name).elapsed(reset=reset) for name in names if name in self._timers}
        texts = [f"{name}: {1000 * seconds / normalizer:.2f}" for name, seconds in known.items()]
        print_rank_last(f"time (ms) | {' | '.join(texts)}")


class _Timer:
    def __init__(self) -> None:
        self._elapsed = 0.0
        self._started: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Start. ``barrier`` is ignored."""
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Stop, and add up."""
        if self._started is not None:
            self._elapsed, self._started = self._elapsed + time.perf_counter() - self._started, None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds so far."""
        running = time.perf_counter() - self._started if self._started is not None else 0.0
        seconds = self._elapsed + running
        if reset:
            self._elapsed = 0.0
        return seconds


def _namespace(run: RunConfig) -> Namespace:
    """The arguments of ``get_args()``: every field under its name, its flag and its aliases, with underscores."""
    values: dict[str, Any] = {}
    for section in filter(is_dataclass, (getattr(run, part.name) for part in fields(run))):
        for setting in fields(section):
            names = names_of(setting) if "flag" in setting.metadata else []
            for name in (setting.name, *(name.removeprefix("--") for name in names)):
                values[name.replace("-", "_")] = getattr(section, setting.name)
    values |= {
        "data_impl": "mmap",  # the only supported format, under Megatron-LM's name
        "mmap_warmup": False,
        "rank": rank(os.environ) or 0,
        "world_size": run.parallel.world_size,
        "data_parallel_size": run.parallel.data_parallel_size,
        "padded_vocab_size": run.model.padded_vocab_size,
    }
    return Namespace(**values | dict(run.extra_args))


@dataclass(frozen=True)
class ClassicProvider(ModelProvider):
    """Functions with Megatron-LM's signatures. Every pipeline stage gets all parts of each sample of a micro-batch."""

    layers_are_stages: ClassVar[bool] = True
    names: list[str] = field(default_factory=list)
    """The keys of a sample, if it is a mapping."""
    last: list[nn.Module] = field(default_factory=list)
    """The module of the last stage, on the ranks of that stage; otherwise empty."""

    def build(self, run: RunConfig, layout: ParallelLayout, is_first: bool, is_last: bool) -> nn.Module:
        """Build a stage by ``model_provider``, with ``pre_process`` and ``post_process`` if it has these parameters."""
        _set_globals(run, layout)
        with user_function("model_provider"):
            parameters = inspect.signature(self.model).parameters
            arguments = {"pre_process": is_first, "post_process": is_last}
            model_provider: Callable[..., Any] = self.model
            model = model_provider(**{name: value for name, value in arguments.items() if name in parameters})
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model_provider returned a {type(model).__name__}: return a torch.nn.Module")
        return model

    def module(self, run: RunConfig, layout: ParallelLayout) -> nn.Module:
        """The full model for ``DeepSpeedEngine``."""
        provider = ModelProvider(lambda *_: self.build(run, layout, True, True), self.datasets, self.forward_step)
        model = provider.module(run, layout)
        assert isinstance(model, ProvidedModel)
        model.loss = self.loss
        return model

    def layers(self, run: RunConfig, layout: ParallelLayout) -> tuple[Layers, LossFn]:
        """One layer per stage, and the loss. Raises ConfigError if the schedule has several model chunks per stage."""
        parallel = run.parallel
        if parallel.chunks_per_stage > 1:
            raise ConfigError(
                f"--pipeline-schedule {parallel.pipeline_schedule} has {parallel.chunks_per_stage} model chunks in a "
                "stage, and model_provider(pre_process, post_process) makes one: use --pipeline-schedule 1f1b"
            )
        stages = parallel.pipe_stages
        build = partial(self.build, run, layout)
        return [LayerSpec(Stage, self, build, number, stages) for number in range(stages)], self._last_loss

    def open(self, run: RunConfig, samples: Sequence[int]) -> list[ProvidedDataset | None]:
        """Open the data sets, and set ``names`` from the first sample."""
        opened = super().open(run, samples)
        assert opened[0] is not None
        with user_function("the data set"):
            first = opened[0].first()
        self.names[:] = first if isinstance(first, Mapping) else []
        return opened

    def batch(self, parts: Sequence[Tensor]) -> Batch:
        """A micro-batch with all parts as inputs, which stages pass on, and again as targets, for the loss."""
        return Batch(parts[0] if len(parts) == 1 else tuple(parts), tuple(parts))

    def step(self, parts: Sequence[Tensor], model: nn.Module) -> tuple[Any, Any]:
        """Call ``forward_step_func``. Returns the output of ``model``, and the loss function or None."""
        sample = dict(zip(self.names, parts, strict=True)) if self.names else tuple(parts)
        with user_function("forward_step_func"):
            result = self.forward_step(iter([sample]), model)
        output, loss_func = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        return output, loss_func if callable(loss_func) else None

    def loss(self, model: nn.Module, inputs: Any, targets: Sequence[Tensor]) -> Tensor:
        """The loss of a micro-batch: the result of ``loss_func``, divided by the number of tokens if it returns one."""
        output, loss_func = self.step(targets, model)
        with user_function("loss_func"):
            result = output if loss_func is None else loss_func(output)
            loss, *others = result if isinstance(result, tuple) else (result,)
            loss = loss / others[0].clamp(min=1) if len(others) == 2 else loss
        return checked_loss(loss, "forward_step_func")

    def _last_loss(self, outputs: Any, targets: Sequence[Tensor]) -> Tensor:
        """The loss on the last pipeline stage, whose module runs here and not in ``Stage.forward``."""
        (model,) = self.last
        if isinstance(outputs, tuple) and len(self.names or targets) < len(outputs):
            _receive(model, outputs[0])
        return self.loss(model, None, targets)


class Stage(nn.Module):
    """A pipeline stage as one layer: (hidden, *parts of the micro-batch) -> (output, *parts)."""

    def __init__(self, provider: ClassicProvider, build: Callable[[bool, bool], nn.Module], number: int, stages: int):
        super().__init__()
        self._provider, self._is_first, self._is_last = provider, number == 0, number == stages - 1
        self.module = build(self._is_first, self._is_last)
        if not hasattr(self.module, "set_input_tensor") and not self._is_first:
            raise ConfigError(
                f"the model of stage {number}, a {type(self.module).__name__}, has no set_input_tensor(), which "
                "receives the output of the previous stage"
            )
        shared = ("share_word_embeddings", "share_embeddings_and_output_weights")
        if stages > 1 and any(getattr(self.module, name, False) for name in shared):
            raise ConfigError(
                "the model shares the word embeddings of its first and last stage, which pretrain() does not sum for a "
                "provided model: use weights of its own for the output, or --pipe-parallel-size 0"
            )
        if self._is_last:
            provider.last[:] = [self.module]

    def forward(self, received: Any) -> Any:
        """Run the stage; the last one returns its input, since its module runs with the loss function."""
        if self._is_last:
            return received
        parts = as_list(received)
        if not self._is_first:
            hidden, *parts = parts
            _receive(self.module, hidden)
        output, _ = self._provider.step(parts, self.module)
        return (output, *parts)


def _receive(module: Any, hidden: Tensor) -> None:
    with user_function("set_input_tensor"):
        module.set_input_tensor(hidden)


def _set_globals(run: RunConfig, layout: ParallelLayout) -> None:
    """Set the global state of ``get_args``, ``get_tokenizer`` and ``megatron.mpu``."""
    if run.parallel.sequence_ranks > 1:
        raise ConfigError("context parallelism is not supported for a program in Megatron-LM's shape: remove its flags")
    _state.run, _state.args = run, _namespace(run)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(run.parallel.model_parallel_size, run.parallel.pipe_stages)


def pretrain(
    train_valid_test_datasets_provider: Callable[..., Sequence[Any]],
    model_provider: Callable[..., Any],
    model_type: Any = ModelType.encoder_or_decoder,
    forward_step_func: Callable[..., Any] | None = None,
    process_non_loss_data_func: Any = None,
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    forward_step: Callable[..., Any] | None = None,
) -> NoReturn:
    """Train a model given by Megatron-LM's functions (docs/adding-a-model.md), and end the process.

    The signature of Megatron-LM 2 and earlier is also accepted, without ``model_type``: ``forward_step_func``,
    ``extra_args_provider`` and ``args_defaults`` are then the positional arguments three to five. With ``forward_step``
    all functions have the signatures of ``megatron.tools.pretraining.pretrain``, which take configuration and layout.

    Args:
        train_valid_test_datasets_provider: called with three numbers of samples; returns three data sets or None, with
            ``len()`` and ``[index]``. A sample is a mapping or tuple of arrays, tensors or numbers.
        model_provider: called with ``pre_process`` and ``post_process``, whether the module has the first and the last
            layer. With a pipeline, all stages but the first need a method ``set_input_tensor(hidden)``.
        forward_step_func: called with an iterator over micro-batches and the model; returns the output of the model
            and ``loss_func(output)``, which returns the mean loss, (loss, report) or (sum, tokens, report).
        process_non_loss_data_func: ignored.
        extra_args_provider: called with the parser, for ``parser.add_argument()``.
        args_defaults: default values of flags by name.
    """
    if forward_step is not None:
        pretraining.pretrain(
            model_provider, train_valid_test_datasets_provider, forward_step, extra_args_provider, args_defaults
        )
    if callable(model_type) and not isinstance(model_type, type):
        extra_args_provider = forward_step_func or extra_args_provider
        args_defaults = process_non_loss_data_func or args_defaults
        forward_step_func, model_type = model_type, ModelType.encoder_or_decoder

    def main() -> int | None:
        provider = ClassicProvider(
            model_provider,
            lambda run, samples: train_valid_test_datasets_provider(list(samples)),
            _check_arguments(forward_step_func, model_type),
            extra_args_provider,
            args_defaults or {},
        )
        return pretraining.main(provided_architecture(provider))

    run_rank(main)


def _check_arguments(forward_step_func: Callable[..., Any] | None, model_type: Any) -> Callable[..., Any]:
    if forward_step_func is None:
        raise ConfigError("pretrain: forward_step_func is missing, the function of a data iterator and the model")
    if getattr(model_type, "name", "") == "encoder_and_decoder":
        raise ConfigError("pretrain: ModelType.encoder_and_decoder is not supported: pretrain_t5.py trains T5")
    return forward_step_func
