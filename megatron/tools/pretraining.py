"""The program that pretrains a model: command line, ranks, engine, data, training; and the same for a user's model."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megatron.cli import read_run
from megatron.common.environment import rank
from megatron.common.formats import wrapped
from megatron.config import RunConfig
from megatron.launch.environment import prepare_environment
from megatron.launch.rank import print_warning, run_rank
from megatron.model.architectures import GPT2
from megatron.model.spec import ArchitectureSpec, architecture_of
from megatron.tools.reporting.callbacks import default_callbacks
from megatron.training.callbacks import Callback
from megatron.training.model_provider import ModelProvider, UserCallback, provided_architecture, user_function

if TYPE_CHECKING:
    from megatron.checkpoint.load import Loaded
    from megatron.checkpoint.run_file import SavedRun
    from megatron.engines.engine import Engine
    from megatron.parallel.layout import ParallelLayout
    from megatron.training.data_iterators import DataIterators
    from megatron.training.trainer import Trainer

ARCHITECTURE = GPT2


def main(architecture: ArchitectureSpec = ARCHITECTURE, callbacks: Sequence[Callback] = ()) -> int | None:
    """Parse and check the command line, then train, observed by ``callbacks``. Returns the exit code of the process.

    Nothing here imports torch, so that a mistake is reported in under a second.
    """
    parsed = read_run(sys.argv[1:], os.environ, architecture)
    is_main_rank = not rank(os.environ)
    if parsed.run.parallel.elastic_layout:
        from megatron.tools.planning.survivors import arguments_at_world_size

        arguments, chosen = arguments_at_world_size(sys.argv[1:], os.environ, architecture)
        parsed = read_run(arguments, os.environ, architecture)
        if is_main_rank:
            print(wrapped(f"> elastic   {chosen}"), flush=True)
    if parsed.run.logging.explain:
        from megatron.tools.planning.explain import explain

        if is_main_rank:
            explain(parsed)
        return None
    run = parsed.checked()
    for warning in parsed.warnings if is_main_rank else ():
        print_warning(warning)
    # Not earlier: it imports numpy, which a mistake need not wait for.
    from megatron.training.preflight import check, data_warnings

    run, _ = check(run)
    prepare_environment(os.environ, run.parallel)
    for warning in data_warnings(run) if is_main_rank else ():
        print_warning(warning)
    if run.logging.dry_run:
        from megatron.tools.planning.explain import dry_run

        if is_main_rank:
            dry_run(run)
        return None
    with user_function("callbacks"):
        observers = [*default_callbacks(), *map(UserCallback, callbacks or ())]
    return train(run, observers)


class Program:
    """What a program trains, and what it starts from: pretraining, where a subclass says nothing else."""

    length_flag, evaluation_flag = "", "--skip-train"
    """The flags that lengthen a finished run, and that evaluate it again."""

    def begin(self, run: RunConfig, saved: "SavedRun | None") -> None:
        """Before the engine is built. ``saved`` is the checkpoint that the run resumes from."""

    def only_evaluates(self, run: RunConfig) -> bool:
        """Whether nothing is trained."""
        return run.train.skip_train

    def describe(self, run: RunConfig) -> str:
        """Lines beside the configuration."""
        return ""

    def load_weights(self, engine: "Engine", run: RunConfig, layout: "ParallelLayout") -> "Loaded":
        """Weights of a run that resumes from no checkpoint."""
        from megatron.checkpoint.huggingface import load_huggingface
        from megatron.checkpoint.load import FRESH

        return load_huggingface(engine, run, layout) if run.checkpoint.load_hf else FRESH

    def data(self, run: RunConfig, layout: "ParallelLayout", skipped: Sequence[range]) -> "DataIterators":
        """The data of the run."""
        from megatron.training.data_iterators import data_iterators

        return data_iterators(run, layout, skipped)

    def trainer(self, **parts: Any) -> "Trainer":
        """The training loop of ``parts``."""
        from megatron.training.trainer import Trainer

        return Trainer(**parts)


def train(run: RunConfig, callbacks: Sequence[Callback], program: Program | None = None) -> int:
    """Set up the ranks, build engine and data, load the checkpoint, train. Returns the exit code of the process."""
    from megatron.training.exit_conditions import ExitConditions

    exit_conditions = ExitConditions(run)  # from here on, signals end the run in an orderly way; others import torch

    from megatron.checkpoint.collective_lock import lock_folder
    from megatron.checkpoint.compatibility import at_saved_sample
    from megatron.checkpoint.snapshot_recovery import select_newest
    from megatron.checkpoint.snapshots import requested_snapshots
    from megatron.cli.settings_file import settings_text
    from megatron.data.image_slots import with_image_slots
    from megatron.tools.reporting.tracing import requested_traces
    from megatron.training.measurements import requested_measurements
    from megatron.training.metrics import MetricsLogger
    from megatron.training.setup import device_name, initialized_ranks, is_finished, log_configuration, start_engine

    program = program or Program()
    with initialized_ranks(run, callbacks) as (layout, progress), lock_folder(run) as lock:
        saved = select_newest(run, lock)
        program.begin(run, saved)
        skipped = saved.skipped_samples if saved and not run.checkpoint.finetune else ()
        run = with_image_slots(at_saved_sample(saved, run), skipped) if saved else run
        flags = {"length_flag": program.length_flag, "evaluation_flag": program.evaluation_flag}
        if saved and not program.only_evaluates(run) and is_finished(saved, run, **flags):
            return 0
        log = MetricsLogger(run, is_main_rank=layout.rank == 0, callbacks=callbacks)
        log_configuration(run, log, program.describe(run))
        opened = partial(program.data, run, layout, skipped)
        # Before the engine is built; but data of the user may need what the user's model has made.
        data = opened() if architecture_of(run.model).provider is None else None
        for callback in callbacks if layout.rank == 0 else ():
            callback.on_run_start(run, device_name())
        load_weights = partial(program.load_weights, run=run, layout=layout)
        engine, checkpointer, loaded = start_engine(
            run, layout, saved, lock, log, settings=settings_text(run), load_weights=load_weights
        )
        observed = run, layout, engine.module
        trainer = program.trainer(
            run=run,
            layout=layout,
            data=data or opened(),
            engine=engine,
            checkpointer=checkpointer,
            log=log,
            exit_conditions=exit_conditions,
            progress=progress,
            snapshots=None if program.only_evaluates(run) else requested_snapshots(checkpointer, run, log.info),
            callbacks=[*callbacks, *requested_traces(*observed), *requested_measurements(*observed)],
        )
        return trainer.train(finished=loaded.iteration)


def pretrain(
    model_provider: Callable[[RunConfig, "ParallelLayout"], Any],
    train_valid_test_datasets_provider: Callable[[RunConfig, Sequence[int]], Sequence[Any]],
    forward_step: Callable[[Iterator[Any], Any], Any],
    extra_args_provider: Callable[[ArgumentParser], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> NoReturn:
    """Train a model of one's own as this program trains GPT-2: docs/adding-a-model.md. Ends the process.

    Args:
        model_provider: called with the configuration and the layout; returns a module, or a list of layers, such as
            DeepSpeed's ``LayerSpec``s, which a pipeline can divide.
        train_valid_test_datasets_provider: called with the configuration and the three numbers of samples that the run
            needs; returns three data sets with ``len()`` and ``[index]``, or None for validation and test. A sample is
            a tuple of tensors, arrays or numbers, the first of which is the input of the model.
        forward_step: called with an iterator over micro-batches, which are samples with a first dimension more, on the
            CPU or GPU of this rank, and the model; returns the mean loss of one micro-batch.
        extra_args_provider: called with the parser, for ``parser.add_argument()``; the values are
            ``run.extra_args[name]``.
        args_defaults: values of flags by name, for which the command line need not give one.
        callbacks: observers of the run.
    """
    provider = ModelProvider(
        model_provider,
        train_valid_test_datasets_provider,
        forward_step,
        extra_args_provider,
        args_defaults or {},
    )
    run_rank(partial(main, provided_architecture(provider), callbacks))
