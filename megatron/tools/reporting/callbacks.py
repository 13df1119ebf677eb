"""Training callbacks that use the planner, the report, the elastic agent, or experiment trackers."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config import RunConfig
from megatron.launch.rank import EXIT_CODE_FOLDER, TRAINED, print_warning
from megatron.model.spec import architecture_of
from megatron.parallel.pipeline.schedule import InstructionHook
from megatron.training.callbacks import Callback, MemoryPlan, warn_if_unwritable


def default_callbacks() -> list[Callback]:
    """The callbacks that the entry scripts register. The planner and the report are imported only when used."""
    return [RunRecord(), Trackers(), MemoryAdvice(), *([FirstIteration()] if EXIT_CODE_FOLDER in os.environ else [])]


class RunRecord(Callback):
    """Writes run.json to ``--run-dir``."""

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Write the configuration, the plan and the environment."""
        if run.observe.run_dir:
            from megatron.tools.reporting.files import RECORD, write_record

            with warn_if_unwritable(RECORD):
                write_record(run, device)


class FirstIteration(Callback):
    """Tells the elastic agent that rank 0 has trained its first iteration after a start."""

    def __init__(self) -> None:
        self._file: Path | None = None

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Remember the file to create; runs on rank 0 only."""
        self._file = Path(os.environ[EXIT_CODE_FOLDER], TRAINED)

    @contextmanager
    def around_iteration(self, iteration: int) -> Iterator[Sequence[InstructionHook]]:
        """Create the file after the first iteration."""
        yield ()
        if self._file is not None:
            with suppress(OSError):
                self._file.touch()
            self._file = None


class MemoryAdvice(Callback):
    """Reports the planned memory of a rank that ran out of memory, and the smallest change that would fit."""

    def on_out_of_memory(self, run: RunConfig, stage: int, available: float) -> MemoryPlan | None:
        """The planner's estimate for a rank of ``stage``, and its advice; None for a model without a spec."""
        if architecture_of(run.model).provider is not None:
            return None
        from megatron.tools.planning.memory import stage_memory

        memory = stage_memory(run)[stage]
        return MemoryPlan(memory.total, memory.parts(), smallest_change(run, stage, available))


def smallest_change(run: RunConfig, stage: int, available: float) -> str:
    """The smallest change of flags with which the planner expects a rank of ``stage`` to fit ``available`` bytes."""
    from megatron.cli.validation import violations
    from megatron.tools.planning.memory import stage_memory

    for flags, changed in _changes(run):
        needed = stage_memory(changed)[stage].total
        if needed <= available and not any(violations(changed)):
            return f"{flags} would take {needed / 1e9:.3g} GB"
    return "no smaller micro-batch, recomputation or ZeRO stage would fit: use more ranks; tools/plan.py says how many"


def _changes(run: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Changes of ``run`` that keep the global batch size and the number of ranks, smallest first."""
    size, steps = run.train.micro_batch_size, run.train.gradient_accumulation_steps
    recomputing = replace(run.activation, checkpoint_activations=True, recompute_granularity="full")
    activations = {"": run.activation}
    if not run.activation.checkpoint_activations:
        activations["--checkpoint-activations"] = recomputing
    least, most = run.zero.zero_stage, 1 if run.parallel.uses_pipeline else 3
    stages = {"": least, **{f"--zero-stage {stage}": stage for stage in range(least + 1, most + 1)}}
    divisors = [2**power for power in range(size.bit_length()) if size % 2**power == 0]
    for zero_flag, stage in stages.items():
        zero = replace(run.zero, zero_stage=stage)
        for recompute_flag, activation in activations.items():
            for divisor in divisors:
                train = replace(
                    run.train, micro_batch_size=size // divisor, gradient_accumulation_steps=steps * divisor
                )
                batch_flags = f"--batch-size {size // divisor} --gas {steps * divisor}" if divisor > 1 else ""
                if flags := " ".join(filter(None, (zero_flag, recompute_flag, batch_flags))):
                    yield flags, replace(run, activation=activation, zero=zero, train=train)


class Trackers(Callback):
    """Sends settings and metrics from rank 0 to Weights & Biases and MLflow, if flags request it.

    Their environment variables, such as WANDB_MODE and MLFLOW_TRACKING_URI, set the destination. A package that fails
    is no longer used, after a warning.
    """

    def __init__(self) -> None:
        self._runs: dict[str, Any] = {}

    def on_run_start(self, run: RunConfig, device: str) -> None:
        """Start a run of each requested package."""
        settings = {f"{part}.{name}": _plain(value) for part, name, value in _settings(run)}
        if run.logging.wandb_project is not None:
            self._attempt("wandb", lambda: self._runs.update(wandb=_WandbRun(run, settings)))
        if run.logging.mlflow_experiment is not None:
            self._attempt("mlflow", lambda: self._runs.update(mlflow=_MlflowRun(run, settings)))

    def on_metrics(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Send the numbers of an iteration."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for package, tracked in list(self._runs.items()):
            self._attempt(package, partial(tracked.log, numbers, iteration))

    def on_run_end(self) -> None:
        """Wait until everything is sent."""
        for package, tracked in list(self._runs.items()):
            self._attempt(package, tracked.end)

    def _attempt(self, package: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # any error: tracking must not end the run
            self._runs.pop(package, None)
            print_warning(f"{package} failed, continuing without: {' '.join(str(error).split())[:300]}")


class _WandbRun:
    def __init__(self, run: RunConfig, settings: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=run.logging.wandb_project, name=run.logging.wandb_exp_name, config=dict(settings)
        )

    def log(self, numbers: dict[str, float], iteration: int) -> None:
        self._run.log(numbers, step=iteration)

    def end(self) -> None:
        self._run.finish()


class _MlflowRun:
    def __init__(self, run: RunConfig, settings: Mapping[str, Any]) -> None:
        import mlflow

        mlflow.set_experiment(run.logging.mlflow_experiment)
        self._library = mlflow
        mlflow.start_run()
        mlflow.log_params({name: value for name, value in settings.items() if value is not None})

    def log(self, numbers: dict[str, float], iteration: int) -> None:
        self._library.log_metrics(numbers, step=iteration)

    def end(self) -> None:
        self._library.end_run()


def _settings(run: RunConfig) -> list[tuple[str, str, Any]]:
    parts = {part: values for part, values in asdict(run).items() if isinstance(values, dict) and part != "ds_config"}
    return [(part, name, value) for part, values in parts.items() for name, value in values.items()]


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)[:250]
